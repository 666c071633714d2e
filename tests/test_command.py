"""What the examples' command lines share: one-line errors, lists of values, outputs that appear together."""

import argparse
import os
import stat
from pathlib import Path

import pytest

from examples import calibrate, calibrate_serving, profile
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


def test_a_device_is_written_to_and_never_replaced(tmp_path):
    """Here a pipe. As root, moving a file to /dev/null's place would take it from everybody."""
    pipe, file = tmp_path / "pipe", tmp_path / "a.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    outputs = Outputs(pipe, file, pipe)
    outputs.add(pipe, "to the pipe")
    outputs.add(file, "to the file")
    outputs.commit()
    assert os.read(reader, 100) == b"to the pipe"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and file.read_text() == "to the file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "pipe"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "a.json", tmp_path / "link.json"
    link.symlink_to(target)
    for content in ("first", "second"):  # where nothing is yet, and where something is
        outputs = Outputs(link)
        outputs.add(link, content)
        outputs.commit()
        assert link.is_symlink() and target.read_text() == content
    with pytest.raises(ValueError, match="two outputs cannot be the same file"):
        Outputs(link, target)
    assert [path.name for path in target.parent.iterdir()] == ["a.json"]


def test_what_cannot_be_written_is_told_beforehand(tmp_path):
    with pytest.raises(OSError, match="File name too long"):
        Outputs(tmp_path / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("command", [calibrate, calibrate_serving, profile])
@pytest.mark.parametrize("arguments", [["--no-such-option"], ["surplus"]])
def test_no_command_ignores_what_it_is_told(command, arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    printed = capsys.readouterr()
    assert exit.value.code == 2 and printed.out == ""
    assert printed.err == f"{command.__name__.split('.')[1]}: error: unrecognized arguments: {arguments[0]}\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--model", "toy", "--device", "abacus"], "--device abacus: not a device torch knows"),
        (["--model", "toy", "--threads", "-1"], "prefill_threads must be 0 or more"),
    ],
)
def test_a_profile_that_cannot_be_taken_is_told_in_one_line(arguments, error, capsys):
    with pytest.raises(SystemExit) as exit:
        profile.main(arguments)
    printed = capsys.readouterr().err
    assert exit.value.code == 2 and printed.count("\n") == 1
    assert printed.startswith(f"profile: error: {error}")
