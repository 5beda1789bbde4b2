# syntax=docker/dockerfile:1
# Two images:
#   docker build --target cluster  -t magistral:cluster .     every role of a run, on GPUs
#   docker build --target verifier -t magistral:verifier .    the judges alone: no torch, no root
# With pyxis and enroot: enroot import dockerd://magistral:cluster, then CONTAINER_IMAGE=... sbatch.

# --- cluster ----------------------------------------------------------------------------------
# SGLang's wheels want CUDA 13 and torch 2.14.1; apex and Transformer Engine compile against both,
# hence the devel image.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS cluster
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# g++ also compiles submissions. rdma-core: without its user space NCCL falls back to sockets.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ git libibverbs1 ibverbs-providers librdmacm1 libnuma1 ninja-build python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=ghcr.io/astral-sh/uv:0.8.17 /uv /usr/local/bin/uv
# Megatron-core 0.16 is tested with Python 3.11, which this Ubuntu has no package of.
ENV UV_PYTHON_INSTALL_DIR=/opt/python \
    UV_NO_CACHE=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH
RUN uv venv --python 3.11.13 --seed /opt/venv

WORKDIR /opt/magistral
COPY requirements/cluster.txt requirements/cluster.txt
RUN uv pip install --requirement requirements/cluster.txt "pybind11==3.0.1"
# For these GPUs: A100, H100, B200. MAX_JOBS bounds the memory of the compilers.
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
ARG NVTE_CUDA_ARCHS="80;90;100"
ARG MAX_JOBS=8
# Megatron-core 0.16.1 names Transformer Engine 2.9 to below 2.12. apex is not on PyPI: what has that
# name there is something else.
RUN NVTE_FRAMEWORK=pytorch uv pip install --no-build-isolation \
        "transformer-engine[core_cu13,pytorch]==2.11.0" \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 uv pip install --no-build-isolation \
        "apex @ git+https://github.com/NVIDIA/apex.git@10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4"

COPY pyproject.toml README.md ./
COPY benchmarks benchmarks
COPY configs configs
COPY megatron_magistral megatron_magistral
COPY verifier_sandbox verifier_sandbox
# The import fails the build where a package was built against another torch.
RUN uv pip install --no-deps --no-build-isolation . \
    && python -c "import apex, megatron.core, sglang, transformer_engine.pytorch"

# --- verifier ---------------------------------------------------------------------------------
FROM python:3.11.13-slim-bookworm AS verifier
# The compiler of submissions in C++.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/magistral
COPY requirements/cpu.txt requirements/cpu.txt
COPY pyproject.toml README.md ./
COPY verifier_sandbox verifier_sandbox
# The pins are constraints: of them only what the extra needs is installed.
RUN pip install --no-cache-dir --constraint requirements/cpu.txt ".[verifier]" \
    && useradd --uid 10001 --create-home judge
USER 10001
WORKDIR /home/judge
EXPOSE 8900
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8900/healthz')"]
# As process 1 it has no parent to end with.
ENTRYPOINT ["python", "-m", "verifier_sandbox", "serve", "--host", "0.0.0.0", "--outlive-parent"]
