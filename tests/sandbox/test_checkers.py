"""What counts as the same output."""

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_sandbox.judge.checkers import output_matches, result_matches, tokens
from verifier_sandbox.protocol import Checker, CheckerKind

TOKENS, LINES, EXACT = (Checker(kind=kind) for kind in ("tokens", "lines", "exact"))
FLOATS = Checker(kind="floats", absolute_tolerance=1e-6, relative_tolerance=1e-6)


@given(st.binary(max_size=300))
def test_tokens_are_those_of_split(text):
    assert list(tokens(text)) == text.split()


@given(st.lists(st.sampled_from([b"1", b" ", b"\n", b"x" * 65535, b"y" * 65536]), max_size=6))
def test_tokens_survive_the_borders_of_chunks(pieces):
    text = b"".join(pieces)
    assert list(tokens(text)) == text.split()


def test_a_long_token_is_put_together_from_pieces_that_double():
    class Text(bytes):
        num_pieces = 0

        def __getitem__(self, key):
            self.num_pieces += 1
            return bytes(self)[key]

    num_chunks = 200
    text = Text(b"1" * (num_chunks << 16))
    assert list(tokens(text)) == [bytes(text)]
    assert text.num_pieces <= math.log2(num_chunks) + 2


def test_a_token_longer_than_the_expected_can_be_ends_the_comparison():
    first, *others = tokens(b"1" * (64 << 16) + b" 2", longest=3)
    assert len(first) <= 1 << 17
    assert others == []


@pytest.mark.parametrize(
    ("checker", "output", "expected"),
    [
        (LINES, b"12\n" * 300_000, b"12\n13"),
        (TOKENS, b"12\n" * 300_000, b"12\n13"),
        (FLOATS, b"12\n" * 300_000, b"12\n13"),
    ],
)
def test_a_flood_takes_little_memory_to_compare(checker, output, expected):
    tracemalloc.start()
    try:
        assert not output_matches(checker, output, expected)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(output)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "flood",
    [b"[" + b"[]," * 300_000 + b"[]]", b"[" + b"{}," * 300_000 + b"{}]", b"9" * 900_000],
    ids=["lists", "dicts", "digits"],
)
@pytest.mark.parametrize("expected", ["[]", '["' + "x" * 100_000 + '"]'], ids=["short", "long"])
def test_json_with_more_parts_than_expected_is_never_parsed(flood, expected):
    tracemalloc.start()
    try:
        assert not result_matches(TOKENS, flood, expected)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(flood)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("checker", "output", "expected", "same"),
    [
        (TOKENS, b"1  2\n3", b"1 2 3\n", True),
        (TOKENS, b"1 2", b"1 2 3", False),
        (TOKENS, b"1 2 3 4", b"1 2 3", False),
        (TOKENS, b"", b"1", False),
        (TOKENS, b"1.0", b"1", False),
        (TOKENS, b"-100000500", b"-100000001", False),
        (TOKENS, b"1000000007", b"1000000000", False),
        (TOKENS, b"yes", b"YES", False),
        (LINES, b"a b  \nc\n\n", b"a b\nc", True),
        (LINES, b"a  b\nc", b"a b\nc", False),
        (LINES, b"a b c", b"a b\nc", False),
        (EXACT, b"a\n", b"a", False),
        (EXACT, b"a\n", b"a\n", True),
        (FLOATS, b"0.30000000000000004", b"0.3", True),
        (FLOATS, b"0.3001", b"0.3", False),
        (FLOATS, b"1e-7", b"0.0", True),
        (FLOATS, b"1000000.5", b"1000000.0", True),
        (FLOATS, b"1000000007", b"1000000000", False),
        (FLOATS, b"3.000", b"3", True),
        (FLOATS, b"3.0000001", b"3", False),
        (FLOATS, b"nan", b"0.5", False),
        (FLOATS, b"inf", b"0.5", False),
        (FLOATS, b"0x1p-1", b"0.5", False),
        (FLOATS, b"1_0.5", b"10.5", False),
        (FLOATS, b"Case 1: 0.5", b"Case 1: 0.5000000001", True),
        (FLOATS, b"9" * 500 + b".5", b"0.5", False),
    ],
)
def test_output_is_compared_as_the_checker_says(checker, output, expected, same):
    assert output_matches(checker, output, expected) is same


@pytest.mark.parametrize(
    ("checker", "output", "expected", "same"),
    [
        (TOKENS, b"[1, [2, 3]]", "[1,[2,3]]", True),
        (TOKENS, b"true", "1", False),
        (TOKENS, b"1", "true", False),
        (TOKENS, b"1.0", "1", True),
        (TOKENS, b"100000000000000000001", "100000000000000000000", False),
        (TOKENS, b"1e20", "100000000000000000001", False),
        (TOKENS, b'{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        (TOKENS, b'{"a": 1}', '{"a": 1, "b": 2}', False),
        (TOKENS, b"0.30000000000000004", "0.3", False),
        (FLOATS, b"[0.30000000000000004]", "[0.3]", True),
        (FLOATS, b"[2]", "[1]", False),
        (TOKENS, b"NaN", "NaN", True),
        (TOKENS, b"not json", "0", False),
        (TOKENS, b"[" * 100000, "[]", False),
        (TOKENS, b'"1"', "1", False),
        (TOKENS, b"null", "0", False),
        (TOKENS, b"-0", "0", True),
        (TOKENS, b"1" + b"0" * 9000, "1" + "0" * 9000, True),
        (TOKENS, b"1" + b"0" * 8999 + b"1", "1" + "0" * 9000, False),
        (TOKENS, b"[" * 900 + b"]" * 900, "[" * 900 + "]" * 900, True),
        (TOKENS, b'"\\ud83d\\ude00"', '"\U0001f600"', True),
        (TOKENS, b'[",", "[", "{"]', '["\\u002c","\\u005b","\\u007b"]', True),
        (FLOATS, b"1" + b"0" * 400, "1.5", False),
        (FLOATS, b"[-1" + b"0" * 400 + b"]", "[1.5]", False),
        (FLOATS, b"1" + b"0" * 400, "Infinity", False),
        (FLOATS, b"1e400", "1.5", False),
        (FLOATS, b"NaN", "NaN", True),
        (FLOATS, b"NaN", "1.5", False),
        (FLOATS, b"true", "1.0", False),
        (FLOATS, b"2", "2.0", True),
        (
            FLOATS,
            b"[" + b", ".join([b"0.49999999999999994"] * 99) + b"]",
            "[" + ",".join(["0.5"] * 99) + "]",
            True,
        ),
    ],
)
def test_results_are_compared_as_json_values(checker, output, expected, same):
    assert result_matches(checker, output, expected) is same


def test_a_program_is_named_exactly_where_one_is_needed():
    with pytest.raises(ValueError, match="program is missing"):
        Checker(kind=CheckerKind.PROGRAM)
    with pytest.raises(ValueError, match="program is unused"):
        Checker(kind="tokens", program={"language": "cpp", "source": ""})
