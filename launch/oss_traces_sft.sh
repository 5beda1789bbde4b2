#!/usr/bin/env bash
# SFT of Medium on open reasoning traces (paper, section 8). 32 nodes train.
#   sbatch launch/oss_traces_sft.sh [section.key=value ...]
#SBATCH --job-name=oss_traces_sft
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
CONFIG=${CONFIG:-configs/oss_traces_sft.yaml}
# shellcheck source=launch/lib/job.sh
source "${SLURM_SUBMIT_DIR:?this is for sbatch}/launch/lib/job.sh"
