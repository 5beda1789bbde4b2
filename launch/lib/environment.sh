# shellcheck shell=bash
# Every environment variable that a job sets, with its reason. What SGLang's server needs beyond
# these is set where it is started (server_environment in megatron_magistral/rollout/sglang_server.py),
# so that a server started by hand has it too.
#
# Of a site, not of a job: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA. NCCL finds the right
# ones on most clusters; set them in launch/site.sh where the preflight's all-reduce is slow or fails.

environment_of() {
    local role=$1
    # Nothing is downloaded: a thousand processes would ask at once, and compute nodes often cannot.
    export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    # Tokenizers are used in processes that fork; their threads would not survive it.
    export TOKENIZERS_PARALLELISM=false
    # Kernels are compiled into a cache of each node: on a shared home, processes race for its files.
    export TRITON_CACHE_DIR=${TMPDIR:-/tmp}/magistral-$UID/triton
    export TORCHINDUCTOR_CACHE_DIR=${TMPDIR:-/tmp}/magistral-$UID/inductor
    # NCCL's warnings say which link or node failed. More than warnings fills the logs of a big job.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # Trainers and SGLang share groups for the weights. SGLang turns NCCL's cuMem allocator and
    # NVLink SHARP off unless told otherwise; both ends of a group must agree.
    export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
    # A job without --gpus-per-node computes on CPUs, also where its nodes have GPUs.
    if ((GPUS_PER_NODE == 0)); then export CUDA_VISIBLE_DEVICES=""; fi
    # A core dump of a rank has the size of its memory, and there is one a rank.
    ulimit -c 0
    # Every stream of a generator, and every file of a big model, is a descriptor.
    ulimit -n "$(ulimit -Hn)"
    if [ "$role" != trainer ]; then return; fi
    # Megatron's overlap of communication and computation relies on kernels that start in the order
    # in which they were queued.
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    # Microbatches differ in length, which fragments the memory of torch's usual allocator.
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    # A collective that failed ends the process with an error, not with silence.
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
}
