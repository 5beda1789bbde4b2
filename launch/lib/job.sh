# shellcheck shell=bash
# The body of every job. The scripts of launch/ differ in their #SBATCH lines and their CONFIG alone;
# what they source runs as the batch script, on the job's first node, and starts the roles by srun.
#
#   begin -> preflight -> each stage that is left -> done | requeue | fail
#
# Set in the environment, all optional:
#   CONFIG            another config than the script's own
#   RUN               run folder on a shared filesystem [runs/<job name>-<job id>]. A requeued job
#                     finds its own and resumes; give another job's to go on with that run.
#   ALLOW_CHANGES=1   go on although the config has changed since the run began
#   VENV              virtual environment with the package [.venv]
#   CONTAINER_IMAGE, CONTAINER_MOUNTS   run every role in a container, by pyxis and enroot
#   MIN_TIME_S        refuse to start with less than this before the time limit [1200]
#   STOP_GRACE_S      longest wait for a checkpoint after USR1 [600]; less than --signal's lead
# launch/site.sh, if there is one, is sourced first: modules, interfaces, containers of your site.
set -uo pipefail # not -e: what fails is handled where it can be named

cd "$SLURM_SUBMIT_DIR" || exit 2
# shellcheck source=/dev/null
if [ -f launch/site.sh ]; then source launch/site.sh; fi
# shellcheck source=launch/lib/environment.sh
source launch/lib/environment.sh
# shellcheck source=launch/lib/steps.sh
source launch/lib/steps.sh

if [ -z "${CONTAINER_IMAGE:-}" ] && [ ! -x "${VENV:-.venv}/bin/python" ]; then
    say "VENV = ${VENV:-$PWD/.venv}: there is no virtual environment; docs/cluster.md says how to" \
        "make it, or set CONTAINER_IMAGE"
    exit 2
fi

RUN=$(realpath --canonicalize-missing "${RUN:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}")
ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
STOP_AT=0 # in seconds of this script: when a requested stop has taken too long; 0: none requested

begin() {
    local owner state="" allow=()
    # Only a job that SLURM still knows can hold the run folder.
    if owner=$(cat "$RUN/slurm/owner" 2>/dev/null); then
        state=$(squeue --noheader --jobs="$owner" --format=%T 2>/dev/null)
    fi
    if [ "${ALLOW_CHANGES:-0}" = 1 ]; then allow=(--allow-changes); fi
    alone begin "$CONFIG" "$@" --run "$RUN" --owner-state "$state" \
        --min-time-s "${MIN_TIME_S:-1200}" ${allow[@]+"${allow[@]}"}
}

preflight() {
    everywhere 1 node && alone compare --run "$RUN" && everywhere "$PLACES_PER_NODE" links
}

run_stage() {
    local stage=$1
    say "stage $stage begins"
    case $stage in
        prepare)
            start prepare "$stage"
            wait_for prepare
            ;;
        sft)
            start trainer "$stage"
            wait_for trainer
            ;;
        selection)
            start generator "$stage"
            start verifier "$stage"
            start controller "$stage"
            wait_for controller
            ;;
        rl)
            # Servers first: they take longest to start.
            start generator "$stage"
            start verifier "$stage"
            start controller "$stage"
            start trainer "$stage"
            wait_for controller trainer
            ;;
    esac || return
    # The services see this and end by themselves.
    alone stage-done "$stage" --run "$RUN" && stop_steps
}

# USR1 comes before the time limit (--signal), TERM with a preemption: save, then be requeued.
# shellcheck disable=SC2317,SC2329 # the traps call it
request_stop() {
    say "$1: asking the trainers for a checkpoint"
    STOP_AT=$((SECONDS + ${STOP_GRACE_S:-600}))
    mkdir -p "$RUN" && touch "$RUN/stop_requested"
}

finish() {
    stop_steps TERM
    alone end --run "$RUN" --code "$1"
    case $? in
        0) exit 0 ;;
        "$REQUEUE")
            scontrol requeue "$SLURM_JOB_ID" ||
                say "SLURM does not requeue this job; go on with: RUN=$RUN sbatch ..."
            exit "$REQUEUE"
            ;;
        *) exit "$(($1 ? $1 : 1))" ;;
    esac
}

trap 'request_stop "the time limit is near"' USR1
trap 'request_stop "SLURM ends this job"' TERM

begin "$@" || exit
preflight || exit
stages=$(alone stages --run "$RUN") || exit
for stage in $stages; do
    if ((STOP_AT)); then finish "$REQUEUE"; fi
    run_stage "$stage" || finish $?
done
finish 0
