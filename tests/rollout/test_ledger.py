"""What is restored from the events of a run, wherever it ended and wherever trainers go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Began,
    Closed,
    Finished,
    How,
    Outcome,
    Rewarded,
    Sampled,
    Taken,
    Trained,
    pack_ids,
    pack_logprobs,
)
from megatron_magistral.rollout.journal import without_content
from megatron_magistral.rollout.ledger import Ledger, LedgerError, Restored
from megatron_magistral.types import FinishReason, Reward, Span
from tests.rollout.histories import PROBLEMS, SIZE, History, token_of


def replay(events: Sequence[AnyEvent], step: int) -> Restored:
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
    return ledger.restore(step, PROBLEMS)


def of(kind: type, events: Sequence[AnyEvent]) -> list:
    return [event for event in events if isinstance(event, kind)]


histories = st.builds(
    lambda seed, count: list(History(seed).events(count)),
    st.integers(0, 2**32),
    st.integers(1, 500),
)


@settings(max_examples=60, deadline=None)
@given(histories, st.data())
def test_every_admitted_group_is_in_exactly_one_place(events, data):
    step = data.draw(st.integers(0, len(of(Trained, events))))
    restored = replay(events, step)
    taken = {o for event in of(Taken, events) if event.step < step for o in event.ordinals}
    gone = {e.ordinal for e in of(Closed, events) if e.outcome is not Outcome.TAKEN}
    places = [
        *taken,
        *gone,
        *(group.ordinal for batch in restored.repeated for group in batch()),
        *(group.ordinal for group, _ in restored.waiting),
        *(group.ordinal for group in restored.unfinished),
    ]
    assert sorted(places) == list(range(restored.next_ordinal))
    assert restored.next_ordinal == len(of(Admitted, events))


@settings(max_examples=60, deadline=None)
@given(histories, st.data())
def test_batches_after_the_step_are_repeated_as_they_were(events, data):
    step = data.draw(st.integers(0, len(of(Trained, events))))
    restored = replay(events, step)
    assert restored.how is How.REPEATED
    batches = [tuple(group.ordinal for group in batch()) for batch in restored.repeated]
    assert batches == [event.ordinals for event in of(Taken, events) if event.step >= step]


@settings(max_examples=60, deadline=None)
@given(histories)
def test_tokens_keep_their_values_and_versions(events):
    restored = replay(events, 0)
    whole = [group for batch in restored.repeated for group in batch()]
    whole += [group for group, _ in restored.waiting]
    completions = {
        (group.ordinal, index): member.completion
        for group in whole
        for index, member in enumerate(group.members)
    }
    for group in restored.unfinished:
        members = enumerate(group.members)
        completions |= {(group.ordinal, i): m.completion for i, m in members if m.completion}
    for (ordinal, member), completion in completions.items():
        own = [e for e in of(Sampled, events) if (e.ordinal, e.member) == (ordinal, member)]
        num_tokens = len(completion.output_ids)
        expected = tuple(token_of((ordinal, member), i) for i in range(num_tokens))
        assert completion.output_ids == expected
        assert completion.logprobs == tuple(-0.5 * (i + 1) for i in range(num_tokens))
        versions = [v.version for v in completion.spans for _ in range(v.end - v.start)]
        sampled = [e.version for e in own for _ in range(len(e.ids) // 4)]
        assert versions == sampled


@settings(max_examples=60, deadline=None)
@given(histories)
def test_generation_goes_on_no_sooner_than_with_the_newest_weights_that_were_used(events):
    restored = replay(events, 0)
    newest = max((e.version for e in events if isinstance(e, Sampled | Admitted)), default=0)
    assert restored.generate_from == newest
    assert len(restored.repeated) >= newest  # trainers get there by what is repeated alone


@settings(max_examples=60, deadline=None)
@given(histories, st.data())
def test_replaying_twice_is_replaying_once(events, data):
    """A resume that is killed before it did anything changes nothing."""
    step = data.draw(st.integers(0, len(of(Trained, events))))
    once = replay(events, step)
    again = replay([*events, Began(step, once.how)], step)
    assert (once.waiting, once.unfinished) == (again.waiting, again.unfinished)
    assert [batch() for batch in once.repeated] == [batch() for batch in again.repeated]
    assert (once.next_ordinal, once.generate_from) == (again.next_ordinal, again.generate_from)


@settings(max_examples=60, deadline=None)
@given(histories, st.data())
def test_a_step_whose_tokens_are_gone_is_sampled_anew_and_no_group_is_lost(events, data):
    taken = of(Taken, events)
    if not taken:
        return
    step = data.draw(st.integers(0, len(taken) - 1))
    gone = set(taken[step].ordinals)
    compacted = [
        e if getattr(e, "ordinal", None) not in gone else without_content(e) for e in events
    ]
    restored = replay([event for event in compacted if event is not None], step)
    assert restored.how is How.ANEW
    assert restored.repeated == () and restored.waiting == ()
    trained = {o for event in taken[:step] for o in event.ordinals}
    left = {e.ordinal for e in of(Closed, events) if e.outcome is not Outcome.TAKEN}
    anew = {group.ordinal for group in restored.unfinished}
    assert trained | left | anew >= set(range(restored.next_ordinal))
    assert not anew & (trained | left)
    assert all(group.num_unfinished == SIZE for group in restored.unfinished)
    assert all(group.due == step + 9 for group in restored.unfinished)
    assert restored.generate_from == step


# --- single cases ------------------------------------------------------------------------------

ADMITTED = Admitted(0, "p0", 1, 0, None, (1,))


def sampled(start: int, *ids: int, version: int = 0) -> Sampled:
    return Sampled(0, 0, start, pack_ids(ids), pack_logprobs([-1.0] * len(ids)), version)


def only_completion(*events: AnyEvent):
    (group,) = replay([Began(0), ADMITTED, *events], 0).unfinished
    return group.members[0].completion


def test_tokens_that_begin_before_the_end_replace_what_was_there():
    """As when an engine turns out to have sampled with other weights than it was to hold."""
    completion = only_completion(
        sampled(0, 1, 2), sampled(2, 3, 4, version=1), sampled(1, 9, version=2)
    )
    assert completion.output_ids == (1, 9)
    assert completion.spans == (Span(0, 0, 1), Span(2, 1, 2))
    assert completion.finish_reason is FinishReason.ABORT


def test_the_spans_that_an_engine_reports_at_the_end_are_those_that_count():
    spans = (Span(0, 0, 1), Span(1, 1, 2))
    ended = Finished(0, 0, spans, FinishReason.LENGTH, "ab")
    completion = only_completion(sampled(0, 1, 2, version=1), ended)
    assert (completion.spans, completion.text) == (spans, "ab")
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("promised", "bound", "due"),
    [(None, None, None), (None, 2, 5), (7, None, 7), (7, 2, 5), (7, 9, 7)],
)
def test_under_another_bound_a_group_is_due_no_later_than_under_either(promised, bound, due):
    """One that was never due would be overtaken for ever by those that are."""
    whole = [
        Admitted(0, "p0", 1, 3, promised, (1,)),
        Finished(0, 0, (), FinishReason.STOP, ""),
        Rewarded(0, 0, Reward(0.1, 0.0, 0.0, 0.0)),
        Closed(0, Outcome.TAKEN, "", 0, (-1, -1)),
    ]
    ledger = Ledger()
    for event in [Began(0), *whole, Admitted(1, "p1", 1, 3, promised, (1,))]:
        ledger.apply(event)
    restored = ledger.restore(0, PROBLEMS, bound)
    assert [each for _, each in restored.waiting] == [due]
    assert [group.due for group in restored.unfinished] == [due]


def test_an_empty_completion_is_not_sampled_again():
    (group,) = replay([Began(0), ADMITTED, Finished(0, 0, (), FinishReason.STOP, "")], 0).unfinished
    assert group.num_unfinished == 0


@pytest.mark.parametrize(
    ("events", "step", "message"),
    [
        ([Began(0)], 1, "go on with step 1, but the journal has no batch of step 0"),
        ([Began(0), ADMITTED, ADMITTED], 0, "group 0 is admitted twice"),
        ([Began(0), Taken(0, (3,))], 0, "group 3 was never admitted"),
        ([Began(0), ADMITTED, Taken(0, (0,)), Taken(0, ())], 0, r"step 0 took groups \[0\], and"),
        ([Began(0), ADMITTED, sampled(2, 1)], 0, "a completion of 0 tokens goes on after 2"),
        (
            [Began(0), Admitted(0, "p9", 1, 0, None, ())],
            0,
            "problem 'p9', which is not among the 5",
        ),
    ],
)
def test_a_journal_that_cannot_be_is_an_error_that_says_why(events, step, message):
    with pytest.raises(LedgerError, match=message):
        replay(events, step)
