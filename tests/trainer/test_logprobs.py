"""Log-probabilities and entropy in chunks against the plain formula in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_magistral.trainer import logprobs as module
from megatron_magistral.trainer.logprobs import logprobs_and_entropy
from tests.trainer.live_bytes import LiveBytes

R, H, V = 37, 16, 101


def _inputs(dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(R, H, generator=generator) * spread).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (R,), generator=generator)


def _plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _gradients(
    hidden: Tensor, weight: Tensor, logprobs: Tensor, entropy: Tensor, *, with_entropy: bool
) -> tuple[Tensor, ...]:
    coefficients = torch.linspace(-1, 2, R, dtype=logprobs.dtype)
    loss = (logprobs * coefficients).sum()
    if with_entropy:
        loss = loss + (entropy * coefficients.flip(0)).sum()
    return torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk_elements", [1, 5 * V, R * V])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_the_plain_formula(
    temperature: float, chunk_elements: int, with_entropy: bool
) -> None:
    hidden, weight, targets = _inputs(torch.float32)
    got = logprobs_and_entropy(
        hidden, weight, targets, temperature=temperature, chunk_elements=chunk_elements
    )
    hidden64, weight64 = (t.detach().double().requires_grad_() for t in (hidden, weight))
    want = _plain(hidden64, weight64, targets, temperature)
    got_grads = _gradients(hidden, weight, *got, with_entropy=with_entropy)
    want_grads = _gradients(hidden64, weight64, *want, with_entropy=with_entropy)
    for ours, plain in itertools.chain(
        zip(got, want, strict=True), zip(got_grads, want_grads, strict=True)
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)


def test_only_the_entropy_may_be_trained() -> None:
    hidden, weight, targets = _inputs(torch.float32)
    hidden64, weight64 = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logprobs_and_entropy(hidden, weight, targets)[1].sum().backward()
    _plain(hidden64, weight64, targets, 1.0)[1].sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), hidden64.grad, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = _inputs(torch.float32, spread=1e3)
    got = logprobs_and_entropy(hidden, weight, targets, chunk_elements=5 * V)
    want = _plain(hidden.detach().double(), weight.detach().double(), targets, 1.0)
    for ours, plain in zip(got, want, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours.detach().double(), plain, rtol=1e-4, atol=1e-2)


def test_bfloat16_weights_give_fp32_results_and_bfloat16_gradients() -> None:
    hidden, weight, targets = _inputs(torch.bfloat16)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, chunk_elements=5 * V)
    want = _plain(hidden.detach().double(), weight.detach().double(), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), want[0], rtol=2e-2, atol=5e-2)
    grads = _gradients(hidden, weight, logprobs, entropy, with_entropy=True)
    assert {g.dtype for g in grads} == {torch.bfloat16}


def test_no_rows_give_no_gradient() -> None:
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.ones(V, H, requires_grad=True)
    logprobs, _ = logprobs_and_entropy(hidden, weight, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_second_backward_pass_gives_the_same_gradient() -> None:
    hidden, weight, targets = _inputs(torch.float32)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets)
    loss = logprobs.sum() + entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_logits_are_gone_after_the_backward_pass() -> None:
    hidden, weight, targets = _inputs(torch.float32)
    logprobs, _ = logprobs_and_entropy(hidden, weight, targets)
    node = logprobs.grad_fn
    assert node is not None
    assert node.kept_CV.shape == (R, V)
    logprobs.sum().backward()
    assert node.kept_CV is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [3, 64, 256])
def test_no_more_than_a_chunk_of_logits_is_ever_in_memory(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int
) -> None:
    """However many rows there are. Blocks of one row stand for what fits into a cache."""
    vocab_size, chunk_rows = 1000, 8
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", vocab_size)
    hidden = torch.randn(num_rows, H).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, H).to(dtype).requires_grad_()
    targets = torch.arange(num_rows)
    row, chunk = 4 * vocab_size, 4 * vocab_size * chunk_rows
    product = 0 if dtype == torch.float32 else chunk // 2  # in the precision of the model
    row_numbers = 4 * 40 * num_rows
    with LiveBytes([hidden, weight, targets]) as live:
        logprobs, entropy = logprobs_and_entropy(
            hidden, weight, targets, chunk_elements=chunk_rows * vocab_size
        )
        assert live.peak <= chunk + product + 3 * row + row_numbers
        (logprobs.sum() + entropy.sum()).backward()
    grads = 4 * (hidden.numel() + weight.numel()) * (1 if dtype == torch.float32 else 2)
    assert chunk < live.peak - live.now or num_rows < chunk_rows
    assert live.peak <= chunk + product + 3 * row + row_numbers + grads
