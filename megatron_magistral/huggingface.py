"""`transformers`, for every module that needs it: `from megatron_magistral.huggingface import ...`.

SGLang requires torchvision, and PyPI's torchvision is a CUDA build that fails to load beside a CPU
build of torch. `transformers` imports it whenever it is installed, if only to read a config, and
then fails too; hidden, it is not missed by models of text.
"""

from __future__ import annotations

import sys

import torch

if torch.version.cuda is None:
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

import transformers

__all__ = ["transformers"]
