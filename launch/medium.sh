#!/usr/bin/env bash
# Magistral Medium: RL in three stages (paper, section 5.2). 32 nodes train, 32 generate.
#   sbatch launch/medium.sh [section.key=value ...]
#SBATCH --job-name=medium
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
CONFIG=${CONFIG:-configs/medium.yaml}
# shellcheck source=launch/lib/job.sh
source "${SLURM_SUBMIT_DIR:?this is for sbatch}/launch/lib/job.sh"
