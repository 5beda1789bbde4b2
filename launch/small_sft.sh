#!/usr/bin/env bash
# Magistral Small, first half: SFT on traces of Medium (paper, section 5.3). 8 nodes train.
#   sbatch launch/small_sft.sh [section.key=value ...]
#SBATCH --job-name=small_sft
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
CONFIG=${CONFIG:-configs/small_sft.yaml}
# shellcheck source=launch/lib/job.sh
source "${SLURM_SUBMIT_DIR:?this is for sbatch}/launch/lib/job.sh"
