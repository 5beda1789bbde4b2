"""In which order buckets are announced to engines and put on the wire."""

from __future__ import annotations

from megatron_magistral.rollout.engine import TensorSpec
from megatron_magistral.weights.delivery import Gathered
from megatron_magistral.weights.stream import BucketStream

LOOKS_A_BROADCAST = 3


class Done:
    """Calls that engines have answered."""

    def settled(self, timeout_s):
        return True

    def failures(self):
        return []


class Engines:
    def __init__(self, events):
        self._events = events

    def start(self, phase, step):
        self._events.append(("announce", step.keywords["group_name"]))
        return Done()


class Verifier:
    """Takes everything."""

    def stranger(self, specs):
        return ""

    def sent(self, specs):
        pass

    def unsent(self):
        return ""

    def expect(self, digests):
        pass


class SlowLane:
    """Sends `num_buckets` alike, each of which is on the wire for some looks."""

    def __init__(self, name, num_buckets, events):
        self.group_name = name
        self._left = num_buckets
        self._looks = 0
        self._events = events

    def next(self):
        self._left -= 1
        return (TensorSpec("weight", (1,), "float32"),) if self._left >= 0 else None

    def start(self):
        self._looks = LOOKS_A_BROADCAST
        self._events.append(("start", self.group_name))

    def wait(self, timeout_s):
        if self._looks:
            self._looks -= 1
            if not self._looks:
                self._events.append(("arrived", self.group_name))
        return not self._looks

    def failure(self):
        return ""

    def check(self, timeout_s):
        pass

    def digests(self):
        return {}


def events_of(num_buckets):
    events = []
    lanes = [SlowLane(f"stage {i}", count, events) for i, count in enumerate(num_buckets)]
    stream = BucketStream(lanes, Engines(events), Gathered([]), Verifier())
    assert stream.prepare() == ""
    stream.run()
    assert stream.num_buckets == sum(num_buckets)
    return events


def test_a_bucket_is_announced_once_the_one_before_has_arrived():
    events = events_of([3, 2])
    kinds = [kind for kind, _ in events]
    assert kinds == ["announce", "start", "arrived"] * 5


def test_stages_take_turns_as_long_as_they_have_buckets():
    announced = [name for kind, name in events_of([1, 3]) if kind == "announce"]
    assert announced == ["stage 0", "stage 1", "stage 1", "stage 1"]
