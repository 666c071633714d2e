"""What the examples' command lines share: one-line errors, lists of values, outputs that appear together."""

import argparse
from pathlib import Path

import pytest

from examples.command import Outputs, Parser, count, items, positive, share


def test_outputs_appear_together(tmp_path):
    first, second = tmp_path / "new" / "a.json", tmp_path / "b.png"
    second.write_text("old")
    outputs = Outputs(first, second, None)
    outputs.add(first, "{}")
    outputs.add(second, b"\x89PNG")
    assert not first.exists() and second.read_text() == "old"
    assert outputs.commit() == [first, second]
    assert (first.read_text(), second.read_bytes()) == ("{}", b"\x89PNG")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.json", "b.png", "new"]


def test_if_one_cannot_be_written_none_appears(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "folder" / "b.png"
    outputs = Outputs(first, second)
    outputs.add(first, "{}")
    outputs.add(second, b"")
    (tmp_path / "folder").write_text("not a folder after all")
    with pytest.raises(OSError):
        outputs.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_errors_are_one_line_with_exit_code_two(capsys):
    parser = Parser("tool", "What it does.")
    with pytest.raises(SystemExit) as exit, parser.user_errors():
        raise ValueError("two\nlines")
    assert exit.value.code == 2
    assert capsys.readouterr().err == "tool: error: two lines\n"
    with pytest.raises(SystemExit), parser.user_errors():
        Path("/no/such/file").read_text()
    assert capsys.readouterr().err == "tool: error: /no/such/file: No such file or directory\n"
    with pytest.raises(ZeroDivisionError), parser.user_errors():
        _ = 1 / 0  # a bug is a bug


def test_lists_of_values():
    assert items(positive)("1, 2.5,10") == [1.0, 2.5, 10.0]
    for kind, text, error in [
        (positive, "1,,2", "'' is not a number"),
        (positive, "1,inf", "must be above 0, got inf"),
        (positive, "nan", "must be above 0, got nan"),
        (positive, "2,2.0", "says something twice"),
        (count, "1.5", "'1.5' is not a whole number"),
        (share, "1.01", "must be above 0 and at most 1, got 1.01"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match=error):
            items(kind)(text)
