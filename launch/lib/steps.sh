# shellcheck shell=bash
# Job steps: how each is placed, and what is waited for.

REQUEUE=75 # the exit code of what has saved its state and is to be started again
POLL_S=2
STOP_STEPS_S=60
declare -A PID=() # of the srun of each role that runs

PLACES_PER_NODE=${SLURM_NTASKS_PER_NODE:-} # one process a GPU
# What was asked for, [type:]number: an exclusive node also has those that were not.
GPUS_PER_NODE=${SLURM_GPUS_PER_NODE:-0}
GPUS_PER_NODE=${GPUS_PER_NODE##*:}
MAGISTRAL_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
MAGISTRAL_TIME_LEFT=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L)
export MAGISTRAL_NODES MAGISTRAL_TIME_LEFT
export MAGISTRAL_PLACES_PER_NODE=$PLACES_PER_NODE MAGISTRAL_GPUS_PER_NODE=$GPUS_PER_NODE

# What sbatch was given is the default of every srun, so that a step without GPUs would ask for all
# of them. Here each step says itself what it gets.
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NNODES
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_ON_NODE
unset SLURM_CPUS_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE

STEP=(
    srun
    --overlap       # a verifier runs beside trainers, on the same cores
    --mem=0         # a step may use all memory of the node, not a share
    --cpu-bind=none # else the steps that share a node are bound to the same first cores
    --mpi=none      # ranks meet by torch's rendezvous; PMIx would only add a way to fail
)
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    STEP+=(
        --container-image="$CONTAINER_IMAGE"
        --container-mounts="$PWD:$PWD,${CONTAINER_MOUNTS:-$HOME:$HOME}"
        --container-workdir="$PWD"
        --no-container-mount-home
    )
else
    PATH="${VENV:-$PWD/.venv}/bin:$PATH"
fi
MAGISTRAL=(python -u -m megatron_magistral.slurm)

say() { echo "$(date +%FT%T) $*"; }

with_gpus() { if ((GPUS_PER_NODE)); then echo "--gres=gpu:$GPUS_PER_NODE"; else echo --gres=none; fi; }

# alone COMMAND...: on the first node.
alone() {
    "${STEP[@]}" --job-name="$1" --nodes=1 --ntasks=1 --nodelist="${MAGISTRAL_NODES%%,*}" \
        --gres=none "${MAGISTRAL[@]}" "$@" </dev/null
}

# everywhere NUM COMMAND: so many tasks on every node. All of them report, whoever fails.
everywhere() {
    local num_per_node=$1 command=$2
    (
        environment_of preflight
        exec "${STEP[@]}" --job-name="$command" --nodes="$SLURM_JOB_NUM_NODES" \
            --ntasks="$((SLURM_JOB_NUM_NODES * num_per_node))" --ntasks-per-node="$num_per_node" \
            "$(with_gpus)" --kill-on-bad-exit=0 "${MAGISTRAL[@]}" "$command" --run "$RUN"
    ) </dev/null
}

# start ROLE STAGE: every task of a role in the background, where the plan puts it. Output goes to a
# file for each task, RUN/logs/<role>-<index>.<node>.log; what comes here are restarts and failures.
start() {
    local role=$1 stage=$2 hosts=$RUN/slurm/$ATTEMPT/$1.hosts gres=--gres=none together=0
    case $role in
        trainer) gres=$(with_gpus) together=1 ;; # one rank that fails leaves the others waiting
        generator) gres=$(with_gpus) ;;
    esac
    (
        environment_of "$role"
        exec "${STEP[@]}" --job-name="$role" --ntasks="$(wc -l <"$hosts")" \
            --distribution=arbitrary --nodelist="$hosts" "$gres" --kill-on-bad-exit="$together" \
            "${MAGISTRAL[@]}" role "$role" --run "$RUN" --stage "$stage"
    ) </dev/null &
    PID[$role]=$!
}

# wait_for ROLE...: until all of these have ended well. Returns the exit code of what fails; a role
# that is not waited for must not end. After a requested stop every end is as good as another.
wait_for() {
    local role code waiting=" $* "
    while [[ $waiting == *[^\ ]* ]]; do
        for role in "${!PID[@]}"; do
            if kill -0 "${PID[$role]}" 2>/dev/null; then continue; fi
            wait "${PID[$role]}"
            code=$?
            unset "PID[$role]"
            if ((code == 0)) && [[ $waiting == *" $role "* ]]; then
                waiting=${waiting/ $role / }
                continue
            fi
            say "$role: all tasks have ended, exit code $code"
            if ((STOP_AT)); then code=$REQUEUE; fi
            return "$((code ? code : 1))"
        done
        if ((STOP_AT && SECONDS > STOP_AT)); then
            say "no checkpoint within ${STOP_GRACE_S:-600} s of the request: the steps since the" \
                "last one are lost; give --signal a longer lead and STOP_GRACE_S more"
            return "$REQUEUE"
        fi
        sleep "$POLL_S" &
        wait $! # a trap runs at once, not after the sleep
    done
}

# stop_steps [TERM]: wait until no role is left; with TERM, or after a while, srun ends its tasks.
stop_steps() {
    local role signal=${1:-} deadline=$((SECONDS + STOP_STEPS_S))
    while ((${#PID[@]})); do
        if ((SECONDS > deadline)); then signal=KILL; fi
        for role in "${!PID[@]}"; do
            if [ -n "$signal" ]; then kill -"$signal" "${PID[$role]}" 2>/dev/null; fi
            if ! kill -0 "${PID[$role]}" 2>/dev/null; then unset "PID[$role]"; fi
        done
        if [ "$signal" = TERM ]; then signal=""; fi # once; srun takes a second one for impatience
        sleep 0.5
    done
}
