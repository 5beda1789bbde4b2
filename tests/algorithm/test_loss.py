"""The loss against a reference that shares no code with it.

The reference walks over groups, completions and tokens in float64 Python, divides where the formula
divides, and chooses the branch of the minimum by cases, so it has its own gradient too.
"""

import math
import random
from typing import Any

import pytest
import torch

from megatron_magistral.algorithm.advantage import minibatch_sequences
from megatron_magistral.algorithm.loss import mean_metrics, policy_loss
from megatron_magistral.algorithm.settings import NormaliseAdvantage, NormaliseLoss
from tests.algorithm.groups import group

EPS_LOW, EPS_HIGH = 0.2, 0.28
CLIP: dict[str, Any] = {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}
EDGE_RATIOS = [
    edge + offset for edge in (1 - EPS_LOW, 1.0, 1 + EPS_HIGH) for offset in (-1e-6, 0.0, 1e-6)
]


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def random_minibatch(rng, num_groups=4):
    """Groups as (reward, [log ratio per token]) per completion; ratios in and around the bounds."""
    groups = []
    for _ in range(num_groups):
        completions = [
            (
                rng.choice([0.0, 0.1, 0.15, 1.0, 1.1]),
                [
                    math.log(rng.choice([*EDGE_RATIOS, rng.uniform(0.3, 3.0)]))
                    for _ in range(rng.choice([0, 1, rng.randint(2, 40)]))
                ],
            )
            for _ in range(rng.randint(2, 6))
        ]
        groups.append(completions)
    return groups


def reference(groups):
    """Loss and d loss / d log-probability of each token, straight from the formula."""
    centred = []
    for completions in groups:
        mean = sum(reward for reward, _ in completions) / len(completions)
        varied = len({reward for reward, _ in completions}) > 1
        centred.append([(reward - mean) * varied for reward, _ in completions])
    flat = [advantage for advantages in centred for advantage in advantages]
    mean = sum(flat) / len(flat)
    std = (sum((advantage - mean) ** 2 for advantage in flat) / len(flat)) ** 0.5

    non_empty = [completions for completions in groups if any(tokens for _, tokens in completions)]
    loss, gradient = 0.0, []
    for completions, advantages in zip(groups, centred, strict=True):
        num_tokens = sum(len(tokens) for _, tokens in completions)
        for (_, tokens), advantage in zip(completions, advantages, strict=True):
            a = (advantage - mean) / std if std else 0.0
            for log_ratio in tokens:
                rho = math.exp(log_ratio)
                if a >= 0 and rho > 1 + EPS_HIGH:
                    value, slope = (1 + EPS_HIGH) * a, 0.0
                elif a < 0 and rho < 1 - EPS_LOW:
                    value, slope = (1 - EPS_LOW) * a, 0.0
                else:
                    value, slope = rho * a, rho * a
                loss -= value / num_tokens / len(non_empty)
                gradient.append(-slope / num_tokens / len(non_empty))
    return loss, gradient


def packed(groups, dtype=torch.float64):
    """Sequence index, logprobs, old, advantages and weights of all output tokens, (T,) each."""
    sequences = minibatch_sequences(
        [
            group([reward for reward, _ in completions], [len(tokens) for _, tokens in completions])
            for completions in groups
        ]
    )
    log_ratios = [tokens for completions in groups for _, tokens in completions]
    index = [i for i, tokens in enumerate(log_ratios) for _ in tokens]
    old = torch.tensor([-1.0 - 0.1 * (i % 7) for i in range(len(index))], dtype=dtype)
    ratio = torch.tensor([ratio for tokens in log_ratios for ratio in tokens], dtype=dtype)
    advantages = torch.tensor([sequences[i].advantage for i in index], dtype=dtype)
    weights = torch.tensor([sequences[i].weight for i in index], dtype=dtype)
    return index, old + ratio, old, advantages, weights


@pytest.mark.parametrize("seed", range(30))
def test_loss_and_gradient_equal_the_reference(seed):
    groups = random_minibatch(random.Random(seed))
    _, logprobs, old, advantages, weights = packed(groups)
    logprobs.requires_grad_()
    outputs = policy_loss(logprobs, old, advantages, weights, **CLIP)
    outputs.loss.backward()
    expected, gradient = reference(groups)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    ratio = (logprobs - old).exp().detach()
    on_a_bound = ((ratio - (1 - EPS_LOW)).abs() < 1e-9) | ((ratio - (1 + EPS_HIGH)).abs() < 1e-9)
    torch.testing.assert_close(  # on the very bound the slope may be either side's
        gradient_of(logprobs)[~on_a_bound],
        torch.tensor(gradient, dtype=torch.float64)[~on_a_bound],
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_loss_gradient_and_metrics_do_not_depend_on_ranks_and_microbatches(seed, num_ranks):
    """Sequences of one group land on different ranks and in different microbatches."""
    rng = random.Random(seed)
    index, logprobs, old, advantages, weights = packed(random_minibatch(rng))
    whole = logprobs.clone().requires_grad_()
    expected = policy_loss(whole, old, advantages, weights, **CLIP)
    expected.loss.backward()

    part_of = {i: (rng.randrange(num_ranks), rng.randrange(3)) for i in set(index)}
    cut = logprobs.clone().requires_grad_()
    loss, sums = 0.0, dict.fromkeys(expected.metrics, 0.0)
    for part in sorted(set(part_of.values())):
        here = torch.tensor([part_of[i] == part for i in index], dtype=torch.bool)
        outputs = policy_loss(cut[here], old[here], advantages[here], weights[here], **CLIP)
        outputs.loss.backward()
        loss += outputs.loss.item()
        sums = {name: sums[name] + value.item() for name, value in outputs.metrics.items()}

    assert loss == pytest.approx(expected.loss.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient_of(cut), gradient_of(whole), rtol=0, atol=0)
    assert sums == pytest.approx({name: v.item() for name, v in expected.metrics.items()})


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.27, 2.0, 2.54, 2.54),
        (1.29, 2.0, 2.56, 0.0),  # clipped high
        (0.5, 2.0, 1.0, 1.0),  # a good token below the region is pulled back, not clipped
        (0.81, -2.0, -1.62, -1.62),
        (0.79, -2.0, -1.6, 0.0),  # clipped low
        (3.0, -2.0, -6.0, -6.0),  # a bad token above the region is pushed down, not clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_one_token_by_hand(ratio, advantage, objective, slope):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zeros, one = torch.zeros(1).double(), torch.ones(1).double()
    loss = policy_loss(logprobs, zeros, one * advantage, one, **CLIP).loss
    loss.backward()
    assert loss.item() == pytest.approx(-objective)
    assert gradient_of(logprobs).item() == pytest.approx(-slope)


def test_gradcheck_with_every_term_on():
    torch.manual_seed(0)
    size = 12

    def draw():
        return torch.randn(size, dtype=torch.float64)

    logprobs, entropy = draw() * 0.3, draw().abs()
    old, behaviour, ema, advantages = draw() * 0.3, draw() * 0.3, draw() * 0.3, draw()
    weights = torch.rand(size).double()
    weights[::4] = 0

    def loss(logprobs, entropy):
        return policy_loss(
            logprobs,
            old,
            advantages,
            weights,
            **CLIP,
            tis_cap=1.5,
            behaviour_logprobs_T=behaviour,
            entropy_T=entropy,
            entropy_coef=0.1,
            ema_logprobs_T=ema,
            kl_coef=0.2,
        ).loss

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(), entropy.requires_grad_()))


def test_an_empty_microbatch_has_loss_zero_and_can_be_differentiated():
    empty = torch.zeros(0, requires_grad=True)
    outputs = policy_loss(empty, empty, empty, empty, **CLIP)
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0
    assert outputs.metrics["num_tokens"].item() == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_untrained_tokens_contribute_nothing_whatever_they_hold(garbage):
    _, logprobs, old, advantages, weights = packed(random_minibatch(random.Random(3)))
    expected = policy_loss(logprobs, old, advantages, weights, **CLIP)

    def pad(values, fill):
        return torch.cat([torch.full((5,), fill, dtype=values.dtype), values])

    padded = pad(logprobs, garbage).requires_grad_()
    outputs = policy_loss(
        padded,
        pad(old, 1.0),
        pad(advantages, garbage),
        pad(weights, 0.0),
        **CLIP,
        entropy_T=pad(logprobs.abs(), garbage),
        entropy_coef=0.0,
        ema_logprobs_T=pad(old, garbage),
    )
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    assert gradient_of(padded)[:5].tolist() == [0.0] * 5
    assert gradient_of(padded).isfinite().all()
    assert all(value.isfinite() for value in outputs.metrics.values())


def test_a_huge_log_ratio_stays_finite_in_float32():
    logprobs = torch.tensor([0.0], requires_grad=True)
    minus_one, one = torch.tensor([-1.0]), torch.ones(1)
    outputs = policy_loss(logprobs, torch.tensor([-500.0]), minus_one, one, **CLIP)
    outputs.loss.backward()
    assert outputs.loss.isfinite() and gradient_of(logprobs).isfinite().all()
    assert all(value.isfinite() for value in outputs.metrics.values())


@pytest.mark.parametrize(("gap", "factor"), [(0.5, 0.5), (1.0, 1.0), (1.9, 1.9), (2.5, 2.0)])
def test_the_truncated_importance_weight_scales_loss_and_gradient_as_a_constant(gap, factor):
    old = torch.tensor([-1.0], dtype=torch.float64)
    one = torch.ones(1).double()
    plain = old.clone().requires_grad_()
    corrected = old.clone().requires_grad_()
    policy_loss(plain, old, one, one, **CLIP).loss.backward()
    outputs = policy_loss(
        corrected, old, one, one, **CLIP, tis_cap=2.0, behaviour_logprobs_T=old - math.log(gap)
    )
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-factor)
    assert gradient_of(corrected).item() == pytest.approx(factor * gradient_of(plain).item())


def test_the_entropy_bonus_rewards_entropy_by_the_weight_of_its_token():
    zeros = torch.zeros(2).double()
    weights = torch.tensor([0.25, 0.5]).double()
    entropy = torch.tensor([2.0, 3.0]).double().requires_grad_()
    outputs = policy_loss(zeros, zeros, zeros, weights, **CLIP, entropy_T=entropy, entropy_coef=0.1)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-0.1 * (0.25 * 2 + 0.5 * 3))
    assert gradient_of(entropy).tolist() == pytest.approx([-0.025, -0.05])
    assert outputs.metrics["entropy"].item() == 5.0


def test_the_kl_term_is_the_exact_kl_in_expectation_over_the_policy():
    policy = torch.tensor([0.5, 0.3, 0.2]).double()
    average = torch.tensor([0.2, 0.5, 0.3]).double()
    zeros = torch.zeros(3).double()
    outputs = policy_loss(  # weighting each token by its probability is the expectation
        policy.log(), policy.log(), zeros, policy, **CLIP, ema_logprobs_T=average.log(), kl_coef=2.0
    )
    exact = (policy * (policy / average).log()).sum().item()
    assert outputs.loss.item() == pytest.approx(2.0 * exact)


def test_metrics_count_clipped_tokens_and_compare_with_the_generator():
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 9.0]).double()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0]).double()
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]).double()
    outputs = policy_loss(ratios.log(), torch.zeros(6).double(), advantages, weights, **CLIP)
    means = mean_metrics({name: value.item() for name, value in outputs.metrics.items()})
    trained = ratios[:5]
    assert means["num_tokens"] == 5
    assert means["clip_fraction_high"] == 1 / 5
    assert means["clip_fraction_low"] == 1 / 5
    assert means["ratio"] == pytest.approx(5.0 / 5)
    assert means["generator_log_ratio_abs"] == pytest.approx(trained.log().abs().mean().item())
    assert means["kl_generator"] == pytest.approx((trained - 1 - trained.log()).mean().item())
    effective = trained.sum() ** 2 / (5 * trained.square().sum())
    assert means["effective_sample_size"] == pytest.approx(effective.item())


def test_metrics_compare_with_the_generator_also_when_old_logprobs_are_recomputed():
    logprobs = torch.tensor([-1.0, -2.0])
    outputs = policy_loss(
        logprobs,
        logprobs,
        torch.ones(2),
        torch.ones(2),
        **CLIP,
        behaviour_logprobs_T=logprobs - 0.25,
    )
    assert outputs.metrics["ratio"].item() == 2.0
    assert outputs.metrics["generator_log_ratio_abs"].item() == pytest.approx(0.5)


def test_means_of_nothing_trained_do_not_divide_by_zero():
    empty = torch.zeros(0)
    sums = policy_loss(empty, empty, empty, empty, **CLIP).metrics
    assert mean_metrics({name: value.item() for name, value in sums.items()}) == {
        "loss": 0.0,
        "num_tokens": 0,
    }


@pytest.mark.parametrize(
    ("switch", "missing"),
    [
        ({"tis_cap": 2.0}, "behaviour_logprobs_T"),
        ({"entropy_coef": 0.1}, "entropy_T"),
        ({"kl_coef": 0.1}, "ema_logprobs_T"),
    ],
)
def test_a_switch_without_its_tensor_is_an_error_that_names_both(switch, missing):
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=rf"{next(iter(switch))}.*{missing}"):
        policy_loss(ones, ones, ones, ones, **CLIP, **switch)


@pytest.mark.parametrize("normalise_loss", NormaliseLoss)
@pytest.mark.parametrize("normalise_advantage", NormaliseAdvantage)
def test_on_policy_the_gradient_of_each_token_is_its_advantage_times_its_weight(
    normalise_advantage, normalise_loss
):
    sequences = minibatch_sequences(
        [group([1.0, 0.1, 0.1], [1, 5, 3]), group([0.0, 1.1], [2, 0])],
        normalise_advantage=normalise_advantage,
        normalise_loss=normalise_loss,
    )
    tokens = [s for s in sequences for _ in range(s.num_output_tokens)]
    logprobs = torch.full((len(tokens),), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([s.advantage for s in tokens]).double()
    weights = torch.tensor([s.weight for s in tokens]).double()
    policy_loss(logprobs, logprobs.detach(), advantages, weights, **CLIP).loss.backward()
    torch.testing.assert_close(gradient_of(logprobs), -advantages * weights)
