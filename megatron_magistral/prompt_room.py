"""How long a prompt may be, so that a whole completion has room beside it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_magistral.config import Config


@dataclass(frozen=True)
class PromptRoom:
    """`num_tokens` of the longest prompt; `why` names what leaves no more."""

    num_tokens: int
    why: str


def longest_prompt(config: Config, context_length: int) -> PromptRoom:
    """The longest prompt that leaves room for a whole completion in every stage of RL: of the
    model's positions, of a microbatch, and of what a generator's KV cache may hold."""
    assert config.rl is not None
    found, longest = [], 0
    for index in range(config.num_rl_stages):
        stage = config.at_stage(index)
        assert stage.rl is not None
        longest = max(longest, stage.reward.l_max)  # groups of the stages before are under way
        bounds = {
            f"the model's {context_length} positions": context_length,
            f"rl.microbatch_tokens = {stage.rl.microbatch_tokens}": stage.rl.microbatch_tokens,
        }
        if (cache := stage.generator.max_total_tokens) is not None:
            bounds[f"generator.max_total_tokens = {cache}"] = cache
        if (budget := stage.rl.kv_budget_tokens) is not None:
            bounds[f"rl.kv_budget_tokens = {budget}"] = budget
        found += [
            (bound - longest, f"reward.l_max = {longest} leaves {bound - longest} of {what}")
            for what, bound in bounds.items()
        ]
    return PromptRoom(*min(found))
