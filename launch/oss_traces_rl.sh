#!/usr/bin/env bash
# RL on the model of oss_traces_sft (paper, section 8). 32 nodes train, 32 generate.
#   sbatch launch/oss_traces_rl.sh [section.key=value ...]
#SBATCH --job-name=oss_traces_rl
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
CONFIG=${CONFIG:-configs/oss_traces_rl.yaml}
# shellcheck source=launch/lib/job.sh
source "${SLURM_SUBMIT_DIR:?this is for sbatch}/launch/lib/job.sh"
