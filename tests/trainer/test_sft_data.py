"""What an SFT step trains: a function of (seed, step) and nothing else."""

import pytest

from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.trainer.batch import pack
from megatron_magistral.trainer.sft_data import encode_traces, sft_sequences, step_indices
from megatron_magistral.types import Trace

TEMPLATE = "Problem: {problem}\n"
TRACES = [
    Trace("a", "What is one and one?", "<think>easy</think>two"),
    Trace("b", "What is two and two?", "<think>hm</think>four"),
    Trace("c", "Count to ten.", "<think>start</think>" + "one two three four " * 20),
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([trace.statement + trace.response for trace in TRACES], 320)


@pytest.mark.parametrize(("num_traces", "batch_size"), [(12, 4), (10, 4), (3, 8)])
def test_every_trace_comes_once_an_epoch(num_traces, batch_size):
    steps = [step_indices(step, num_traces, batch_size, seed=0) for step in range(12)]
    order = [index for step in steps for index in step]
    for begin in range(0, len(order) - num_traces + 1, num_traces):
        assert sorted(order[begin : begin + num_traces]) == list(range(num_traces))


def test_a_step_is_the_same_whatever_came_before():
    later = step_indices(7, 100, 16, seed=3)
    for step in range(7):
        step_indices(step, 100, 16, seed=3)
    assert step_indices(7, 100, 16, seed=3) == later


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(step_indices(step, 50, 50, seed)) for step in range(2) for seed in range(2)}
    assert len(orders) == 4


def test_response_tokens_of_a_step_are_weighted_equally_and_sum_to_1():
    sequences = sft_sequences([([1, 2], [3]), ([1], [4, 5, 6, 7]), ([1, 2, 3], [8, 9])])
    assert len({s.weight for s in sequences}) == 1
    assert sum(s.weight * s.num_output_tokens for s in sequences) == pytest.approx(1.0)


def test_a_sequence_is_the_prompt_and_then_the_response():
    (sequence,) = sft_sequences([([1, 2], [3, 4, 5])])
    assert sequence.tokens == (1, 2, 3, 4, 5)
    assert sequence.num_prompt_tokens == 2


def test_only_tokens_of_responses_are_trained():
    batch = pack(sft_sequences([([1, 2], [3, 4]), ([5, 6, 7], [8, 9, 10])]), multiple_of=16)
    assert batch.targets_R.tolist() == [3, 4, 8, 9, 10]
    assert batch.tokens_T[batch.rows_R].tolist() == [2, 3, 7, 8, 9]  # each predicts the next


def test_general_instructions_follow_their_own_prompt_and_no_template(tokenizer):
    trace = Trace("", "", "two", prompt="Say two.")
    ((prompt, response),) = encode_traces([trace], tokenizer, TEMPLATE, max_tokens=512)
    assert prompt == tokenizer.encode("Say two.")
    assert tokenizer.decode(response, skip_special_tokens=True) == "two"


def test_a_response_ends_in_the_end_of_sequence_token_and_nowhere_else(tokenizer):
    for prompt, response in encode_traces(TRACES, tokenizer, TEMPLATE, max_tokens=512):
        assert response.index(tokenizer.eos_token_id) == len(response) - 1
        assert tokenizer.eos_token_id not in prompt


def test_prompt_and_response_decode_to_template_and_trace(tokenizer):
    prompt, response = encode_traces(TRACES[:1], tokenizer, TEMPLATE, max_tokens=512)[0]
    assert prompt == tokenizer.encode("Problem: What is one and one?\n")
    assert tokenizer.decode(response, skip_special_tokens=True) == TRACES[0].response


def test_a_trace_that_is_too_long_is_set_aside_whole(tokenizer, caplog):
    encoded = encode_traces(TRACES, tokenizer, TEMPLATE, max_tokens=60)
    assert [len(prompt + response) <= 60 for prompt, response in encoded] == [True, True]
    assert "set aside 1 traces of more than 60 tokens" in caplog.text


def test_no_trace_that_fits_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="none of 3 traces fits into 5 tokens"):
        encode_traces(TRACES, tokenizer, TEMPLATE, max_tokens=5)
