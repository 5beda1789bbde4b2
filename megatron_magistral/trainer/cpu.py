"""Runs Megatron-core without CUDA: on the CPU, over gloo, without Transformer Engine or apex.

    cpu.install()                       # before anything imports megatron.core
    from megatron.core import ...

Megatron-core names CUDA in many places: `device="cuda"`, `torch.cuda.current_device()`, streams,
`Tensor.cuda()`, comparisons with `'torch.cuda.FloatTensor'`. An import hook gives each of its
modules, as it is imported, a stand-in for the global name `torch` in which "cuda" means the CPU;
a few modules get a patch more, each with its reason below. Nothing changes for other packages,
but for `Tensor.cuda`, which could only raise here. Where CUDA is available `install` does nothing.

Works with megatron-core >= 0.16.1, < 0.20.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron_magistral.trainer.cpu_kernels import PackedRotary, add_weight_grad, swiglu

# Both raise something other than ImportError when they are installed but cannot load.
_CUDA_ONLY_PACKAGES = ("transformer_engine", "apex")


def is_cpu() -> bool:
    """Whether training runs on the CPU, that is, whether `install` has an effect."""
    return not torch.cuda.is_available()


def install() -> None:
    """Installs the import hook once. Raises RuntimeError if megatron.core was imported before."""
    if not is_cpu() or _Finder in sys.meta_path:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("cpu.install() must run before the first import of megatron.core")
    for package in _CUDA_ONLY_PACKAGES:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*not installed")


# --- the stand-in for `torch` -----------------------------------------------------------------


class _Stream:
    """A CUDA stream or event on a device that has one queue: there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def _nothing(self, *args: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _nothing


class _Cuda(ModuleType):
    """`torch.cuda`; what is not named here is taken from the real one."""

    Stream = Event = _Stream
    current_stream = default_stream = staticmethod(lambda *args: _Stream())
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    current_device = staticmethod(lambda: "cpu")  # megatron.core passes it on as `device=`
    synchronize = empty_cache = staticmethod(lambda *args: None)
    get_rng_state = staticmethod(lambda *args: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *args: torch.set_rng_state(state))
    manual_seed = staticmethod(torch.manual_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable) -> staticmethod:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # pinning is a service of the CUDA driver
        return factory(*args, **kwargs)

    return staticmethod(wrapper)


class _Torch(ModuleType):
    """`torch`, whose factories put on the CPU what they are told to put on "cuda"."""

    cuda = _Cuda("torch.cuda")

    for _name in (
        *("arange", "empty", "empty_like", "full", "ones", "ones_like"),
        *("randn", "tensor", "zeros", "zeros_like"),
    ):
        locals()[_name] = _on_cpu(getattr(torch, _name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _Torch("torch")


# --- patches of single modules ----------------------------------------------------------------


def _patch_jit(module: ModuleType) -> None:
    """jit_fuser is torch.compile: here that means a C++ compiler and seconds per function."""
    module.disable_jit_fuser()


def _patch_random(module: ModuleType) -> None:
    """The tracker of "CUDA" random states must fork the CPU's generator."""

    def get_state(device: object = "cpu", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]
    # `checkpoint` warns that the CPU's state changed: it did, that is the one it should restore.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _patch_p2p(module: ModuleType) -> None:
    """The interleaved schedule frees the storage of what it is still sending. A CUDA stream
    orders the two; gloo would send freed memory, silently. So send a copy."""
    p2p_ops = module._p2p_ops

    def copying_p2p_ops(
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        prev, next_ = (
            None if tensor is None else tensor.detach().clone()
            for tensor in (tensor_send_prev, tensor_send_next)
        )
        return p2p_ops(tensor_send_prev=prev, tensor_send_next=next_, **kwargs)

    module._p2p_ops = copying_p2p_ops  # type: ignore[attr-defined]


def _with_cuda_type_names(function: Callable) -> Callable:
    """The optimizers compare `Tensor.type()` with CUDA's names: answer with those, during the
    call only."""
    real = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = real  # type: ignore[method-assign]

    return wrapper


def _patch_clip_grads(module: ModuleType) -> None:
    name = "clip_grad_by_total_norm_fp32"
    setattr(module, name, _with_cuda_type_names(getattr(module, name)))


def _patch_optimizer(module: ModuleType) -> None:
    cls = module.Float16OptimizerWithFloat16Params
    cls.__init__ = _with_cuda_type_names(cls.__init__)


def _patch_distrib_optimizer(module: ModuleType) -> None:
    cls = module.DistributedOptimizer
    cls.__init__ = _with_cuda_type_names(cls.__init__)
    if not module.HAVE_APEX_OR_TE:
        module.Adam = Adam  # type: ignore[attr-defined]
        module.HAVE_APEX_OR_TE = True  # type: ignore[attr-defined]
        module.USING_APEX_OPTIMIZER = True  # type: ignore[attr-defined]


def _patch_optimizer_factory(module: ModuleType) -> None:
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam = Adam  # type: ignore[attr-defined]
        module.USING_PYTORCH_OPTIMIZER = False  # type: ignore[attr-defined]


def _patch_moe_utils(module: ModuleType) -> None:
    """The router reads `te_general_gemm`, which 0.16 defines only with Transformer Engine; and
    only split sizes on a GPU are turned into the list that all_to_all_single takes."""
    vars(module).setdefault("te_general_gemm", None)

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = to_cpu  # type: ignore[attr-defined]


# --- patches for speed ------------------------------------------------------------------------


def _patch_mlp(module: ModuleType) -> None:
    """What Megatron calls with `bias_activation_fusion`."""

    def bias_swiglu(x: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        return swiglu(x if bias is None else x + bias)

    module.bias_swiglu_impl = bias_swiglu  # type: ignore[attr-defined]


def _patch_attention(module: ModuleType) -> None:
    """Rotary embeddings of packed sequences, where all of a head's size is rotated in halves."""
    plain = module.apply_rotary_pos_emb
    packed_rotary = PackedRotary()

    def apply_rotary_pos_emb(
        t: torch.Tensor,
        freqs: torch.Tensor,
        config: Any,
        cu_seqlens: torch.Tensor | None = None,
        mscale: float = 1.0,
        **kwargs: Any,
    ) -> torch.Tensor:
        is_in_halves = not (config.rotary_interleaved or config.multi_latent_attention)
        if cu_seqlens is None or not is_in_halves or freqs.shape[-1] != t.shape[-1]:
            return plain(t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, **kwargs)
        return packed_rotary(t, freqs, cu_seqlens, mscale)

    module.apply_rotary_pos_emb = apply_rotary_pos_emb  # type: ignore[attr-defined]


def _patch_linear_layers(module: ModuleType) -> None:
    """What Megatron calls with `gradient_accumulation_fusion`, in place of apex's kernels."""
    module._grad_accum_fusion_available = True  # type: ignore[attr-defined]
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(  # type: ignore[attr-defined]
        wgrad_gemm_accum_fp32=add_weight_grad, wgrad_gemm_accum_fp16=add_weight_grad
    )


def _patch_grad_buffer(module: ModuleType) -> None:
    """A group of one rank has nothing to exchange, but gloo would copy all of it."""

    def unless_alone(collective: Callable) -> Callable:
        @functools.wraps(collective)
        def wrapper(
            output: torch.Tensor, source: torch.Tensor, *, group: Any, **kwargs: Any
        ) -> Any:
            if group.size() > 1:
                return collective(output, source, group=group, **kwargs)
            if output.data_ptr() != source.data_ptr():
                output.copy_(source)
            return None

        return wrapper

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(module, name, unless_alone(getattr(module, name)))


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.pipeline_parallel.p2p_communication": _patch_p2p,
    "megatron.core.optimizer.clip_grads": _patch_clip_grads,
    "megatron.core.optimizer.optimizer": _patch_optimizer,
    "megatron.core.optimizer.distrib_optimizer": _patch_distrib_optimizer,
    "megatron.core.optimizer": _patch_optimizer_factory,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.transformer.mlp": _patch_mlp,
    "megatron.core.transformer.attention": _patch_attention,
    "megatron.core.tensor_parallel.layers": _patch_linear_layers,
    "megatron.core.distributed.param_and_grad_buffer": _patch_grad_buffer,
}


class _Finder:
    """Finds the modules of megatron.core as usual, and adapts each once it has been executed."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if getattr(module, "torch", None) is torch:
                module.torch = _TORCH  # type: ignore[attr-defined]
            if patch := _PATCHES.get(name):
                patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# --- Adam -------------------------------------------------------------------------------------


class Adam(torch.optim.Optimizer):
    """AdamW as Megatron expects apex's FusedAdam to be: one step count per parameter group.

    Megatron's own fallback, torch.optim.AdamW, keeps a step per parameter. Under the distributed
    optimizer such a state cannot be loaded before a first step, and after loading all parameters
    share one step tensor, which each of them increments: training resumes silently wrong.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is implemented")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        grads: list[torch.Tensor] = [p.grad for p in params if p.grad is not None]
        mean, mean_sq = ([self.state[p][k] for p in params] for k in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), lr, step = group["betas"], group["lr"], group["step"]
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(mean_sq, beta2)
        torch._foreach_addcmul_(mean_sq, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(mean_sq)
        torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, mean, denominator, -lr / (1 - beta1**step))
