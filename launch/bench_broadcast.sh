#!/usr/bin/env bash
# How long new weights take from the trainers' GPUs to the generators' over this cluster's links, and
# before that, whether every pair of ranks reaches each other: `magistral bench broadcast` by srun.
# The layout fills the ranks of the job: 8 trainers and 2 generators of 4 GPUs here. For another:
#   sbatch --nodes=16 launch/bench_broadcast.sh --dp 8 --replicas 16
# Without GPUs: sbatch --nodes=2 --ntasks-per-node=1 --gpus-per-node=0 launch/bench_broadcast.sh \
#                   --model 64 --tp 1 --replicas 1 --generator-tp 1
#SBATCH --job-name=bench_broadcast
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?this is for sbatch}" || exit 2
# shellcheck source=/dev/null
if [ -f launch/site.sh ]; then source launch/site.sh; fi
# shellcheck source=launch/lib/environment.sh
source launch/lib/environment.sh
# shellcheck source=launch/lib/steps.sh
source launch/lib/steps.sh

bench() {
    environment_of trainer
    # Rank 0 is on the node that srun is called on, whose address srun tells its tasks.
    # shellcheck disable=SC2016 # the tasks expand it
    "${STEP[@]}" --job-name=bench --nodes="$SLURM_JOB_NUM_NODES" \
        --ntasks="$((SLURM_JOB_NUM_NODES * PLACES_PER_NODE))" --ntasks-per-node="$PLACES_PER_NODE" \
        "$(with_gpus)" --kill-on-bad-exit=1 \
        bash -c 'MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR exec "$@"' bash \
        python -u -m benchmarks.broadcast --model magistral-small-24b --tp 8 \
        --replicas 2 --generator-tp 4 --bucket-mib 512 "$@" </dev/null
}

bench --preflight "$@" && bench --json "bench_broadcast-$SLURM_JOB_ID.json" "$@"
