"""Rows that processes append and others read meanwhile."""

from __future__ import annotations

import pytest

from megatron_magistral import jsonl
from megatron_magistral.jsonl import (
    DamagedRows,
    drop_last_rows,
    keep_rows,
    lines_from_end,
    read_rows,
)


def test_a_line_that_a_killed_process_left_half_written_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    keep_rows(path, lambda row: True)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_file_with_nothing_to_drop_is_not_touched(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n')
    before = path.stat()
    keep_rows(path, lambda row: row["step"] < 1)
    keep_rows(tmp_path / "absent.jsonl", lambda row: True)
    assert path.stat() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_were_written_to_their_end_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0, "loss": NaN}\n{"step": 1}\n{"st')
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    assert read_rows(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("line", ["\0\0\0", '{"step": 1', "[1]", ""])
def test_a_damaged_line_is_an_error_that_names_it_and_nothing_is_dropped(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    content = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'
    path.write_text(content)
    with pytest.raises(DamagedRows, match=rf"{path}: line 2 is no JSON"):
        read_rows(path)
    with pytest.raises(DamagedRows):
        keep_rows(path, lambda row: False)
    assert path.read_text() == content


# --- files that are too large to be read whole --------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("text", ["", "a\n", "a\n\nbcd\nef\n", "abc\nde", "\n", "a"])
def test_lines_are_read_from_the_end(tmp_path, monkeypatch, block_bytes, text):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    found = list(lines_from_end(path))
    assert b"".join(line for _, line in reversed(found)) == text.encode()
    assert [line for _, line in reversed(found)] == text.encode().splitlines(keepends=True)
    assert all(text.encode()[offset:].startswith(line) for offset, line in found)


@pytest.mark.parametrize("step", range(5))
def test_rows_of_later_steps_are_dropped_from_the_end(tmp_path, step):
    path = tmp_path / "rows.jsonl"
    lines = [f'{{"step": {number}}}\n' for number in (0, 0, 1, 2, 2, 2, 3)]
    path.write_text("".join(lines) + '{"ste')
    drop_last_rows(path, lambda row: row["step"] >= step)
    assert path.read_text() == "".join(line for line in lines if int(line[9]) < step)
    drop_last_rows(tmp_path / "absent.jsonl", lambda row: True)


def test_only_what_is_dropped_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 16)
    path = tmp_path / "rows.jsonl"
    path.write_text("this is no JSON\n" * 99 + '{"step": 1}\n{"step": 2}\n')
    drop_last_rows(path, lambda row: row["step"] >= 2)
    assert path.read_text().endswith('JSON\n{"step": 1}\n')
    content = path.read_bytes()
    with pytest.raises(DamagedRows, match=r"at byte 1568 is no JSON"):
        drop_last_rows(path, lambda row: row["step"] >= 1)
    assert path.read_bytes() == content
