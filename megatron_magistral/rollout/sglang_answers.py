"""What one rank of an engine does about its weights when our trainer asks it directly."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_magistral.rollout.sglang_receive import Receiver
from megatron_magistral.rollout.sglang_weights import Placement, digests, observe_loading


class RankAnswers:
    """`rank` is the number of this rank in its engine."""

    def __init__(self, rank: int) -> None:
        self._receiver = Receiver(rank)
        self._placement: Placement | None = None

    def answer(self, model: Any, question: dict[str, Any]) -> dict[str, Any]:
        """What this rank says to one of these:

        {"place": tensors}                           where each of a manifest would be loaded
        {"digest": names, "heads": names}            digests of what is loaded, or of heads
        {"join": group}, {"leave": name}             a group for its part of the weights
        {"receive": {"group": name, "names": [..]}}  its part of these, into the parameters

        Raises:
            ValueError: another question, or one about tensors that were never placed.
        """
        match question:
            case {"place": tensors}:
                self._placement = observe_loading(model, tensors)
                return asdict(self._placement)
            case {"join": group}:
                self._receiver.join(group)
            case {"leave": name}:
                self._receiver.leave(name)
            case {"digest": names, "heads": heads}:
                return digests(model, self._placed(), names, heads)
            case {"receive": {"group": name, "names": names}}:
                self._receiver.receive(model, self._placed(), name, names)
            case _:
                raise ValueError(f"no such question: {', '.join(sorted(question))}")
        return {}

    def _placed(self) -> Placement:
        if self._placement is None:
            raise ValueError("this needs a manifest that was placed before")
        return self._placement
