#!/usr/bin/env bash
# The whole system on nodes without GPUs: a model of one million parameters, two trainer ranks and
# a generator. To see that SLURM, the shared filesystem and the network do what the big runs need.
#   sbatch launch/tiny.sh [section.key=value ...]
#SBATCH --job-name=tiny
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=3
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
CONFIG=${CONFIG:-configs/tiny.yaml}
# shellcheck source=launch/lib/job.sh
source "${SLURM_SUBMIT_DIR:?this is for sbatch}/launch/lib/job.sh"
