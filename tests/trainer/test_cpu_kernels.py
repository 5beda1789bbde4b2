"""The CPU's fused layer parts against the plain formulas, left to autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_magistral.trainer.cpu_kernels import (
    PackedRotary,
    add_weight_grad,
    rms_norm,
    swiglu,
)

LENGTHS = [3, 1, 7]
HEADS, SIZE = 2, 8


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _angles(length: int) -> Tensor:
    half = torch.outer(torch.arange(length), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    return torch.cat([half, half], dim=-1)[:, None, None]


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def _plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _plain_rotary(x: Tensor) -> Tensor:
    """Each pair as a complex number, times e^(i angle)."""
    angles = torch.cat([_angles(length)[:, 0, :, : SIZE // 2] for length in LENGTHS]).double()
    first, second = x.chunk(2, dim=-1)
    real = first * angles.cos() - second * angles.sin()
    return torch.cat([real, first * angles.sin() + second * angles.cos()], dim=-1) * 1.5


def _rotary(x: Tensor) -> Tensor:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    return PackedRotary()(x, _angles(max(LENGTHS)), cu_seqlens, 1.5)


CASES: dict[str, tuple[Callable, Callable, list[Tensor]]] = {
    "rms_norm": (
        lambda x, weight: rms_norm(x, weight, 1e-3),
        _plain_rms_norm,
        [_normal(5, 3, 16), _normal(16, seed=1)],
    ),
    "swiglu": (swiglu, _plain_swiglu, [_normal(5, 3, 14)]),
    "rotary": (_rotary, _plain_rotary, [_normal(sum(LENGTHS), HEADS, SIZE)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_formula(name: str) -> None:
    ours, plain, inputs = CASES[name]
    inputs32 = [t.clone().requires_grad_() for t in inputs]
    inputs64 = [t.double().requires_grad_() for t in inputs]
    got, want = ours(*inputs32), plain(*inputs64)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    coefficients = _normal(*got.shape, seed=2)
    got_grads = torch.autograd.grad(got, inputs32, coefficients)
    want_grads = torch.autograd.grad(want, inputs64, coefficients.double())
    for ours_grad, plain_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(ours_grad.double(), plain_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_in_gives_bfloat16_out_and_gradients(name: str) -> None:
    ours, plain, inputs = CASES[name]
    inputs16 = [t.bfloat16().requires_grad_() for t in inputs]
    got = ours(*inputs16)
    want = plain(*(t.detach().double() for t in inputs16))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(got.sum(), inputs16)
    assert {g.dtype for g in grads} == {torch.bfloat16}


@pytest.mark.parametrize("name", CASES)
def test_a_view_of_a_larger_tensor_gives_what_its_copy_gives(name: str) -> None:
    ours, _, (x, *others) = CASES[name]
    view = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    assert not view.is_contiguous()
    torch.testing.assert_close(ours(view, *others), ours(x, *others))


def test_rotary_tables_follow_the_microbatch() -> None:
    rotary, angles = PackedRotary(), _angles(4)
    x = _normal(4, HEADS, SIZE)
    one, two = torch.tensor([0, 4]), torch.tensor([0, 2, 4])
    results = [rotary(x, angles, cu_seqlens, 1.0) for cu_seqlens in (one, two, one)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0][:2], results[1][:2])
    assert torch.equal(results[1][2:], rotary(x[2:], angles, torch.tensor([0, 2]), 1.0))
    assert not torch.equal(results[0][2:], results[1][2:])
    torch.testing.assert_close(rotary(x, angles, one, 2.0), 2 * results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up_in_fp32(dtype: torch.dtype) -> None:
    x, grad = _normal(9, 4).to(dtype), _normal(9, 6, seed=1).to(dtype)
    main_grad = torch.full((6, 4), 1000.0)
    for _ in range(2):
        add_weight_grad(x, grad, main_grad)
    want = 1000.0 + 2 * (grad.double().T @ x.double())
    # bfloat16 keeps 8 bits: at 1000 it would round to multiples of 4.
    tolerance = 1e-3 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(main_grad.double(), want, rtol=0, atol=tolerance)
