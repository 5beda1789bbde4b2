"""What a rank does while it waits for its share of a step."""

from __future__ import annotations

from megatron_magistral.trainer.feed import Instead
from megatron_magistral.trainer.loop import next_batch
from megatron_magistral.types import Batch

BATCH = Batch(3, (), ())


class Feed:
    """Gives these answers, one after the other; keeps how many updates it was told of."""

    def __init__(self, *answers: Batch | Instead) -> None:
        self.answers = list(answers)
        self.told: list[int] = []

    def pull(self, step: int, data_rank: int, num_updates: int) -> Batch | Instead:
        self.told.append(num_updates)
        return self.answers.pop(0)


class Publisher:
    def __init__(self) -> None:
        self.versions: list[int] = []

    def publish(self, version: int) -> dict[str, float]:
        self.versions.append(version)
        return {}


def test_the_present_weights_are_published_as_often_as_the_controller_asks():
    feed, publisher = Feed(Instead.PUBLISH, Instead.PUBLISH, BATCH), Publisher()
    assert next_batch(feed, publisher, 3, 0) is BATCH
    assert publisher.versions == [3, 3]
    assert feed.told == [0, 1, 2]


def test_a_run_that_is_to_stop_has_no_next_batch():
    assert next_batch(Feed(Instead.PUBLISH, Instead.STOP), Publisher(), 3, 0) is None
