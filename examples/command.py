"""What the command lines of the examples share: errors in one line, and outputs that appear together or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2. The help is the module's docstring, as it stands."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    @contextmanager
    def user_errors(self) -> Iterator[None]:
        """Around what reads the user's options and files: there a ValueError or OSError is the user's, and is told as
        such; anywhere else it is a bug."""
        try:
            yield
        except OSError as error:
            self.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except ValueError as error:
            self.error(str(error))


def items(of: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argparse type: `a,b,c`, each of it read by `of`; at least one, and none twice."""

    def parse(text: str) -> list[T]:
        values = [of(part.strip()) for part in text.split(",")]
        if len(set(map(repr, values))) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} says something twice")
        return values

    return parse


def nonempty(text: str) -> str:
    """An argparse type: anything but nothing."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name")
    return text


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def count(text: str) -> int:
    """An argparse type: a whole number, at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def share(text: str) -> float:
    """An argparse type: a number above 0, at most 1."""
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def whole(text: str) -> int:
    """An argparse type: a whole number of any sign."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def picture(text: str) -> Path:
    """An argparse type: where to draw a PNG."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, and a PNG is what is drawn")
    return path


class Outputs:
    """Files to write when all the work is done: until `commit` nothing of them is there, afterwards all is.

    A symbolic link is followed. What is there and is no file (a pipe, a device) is written to, and never replaced.
    """

    def __init__(self, *paths: Path | None) -> None:
        """`paths` are those that will be added. OSError now, not after the work, for one that cannot be written;
        ValueError for one that is named twice."""
        self._contents: dict[Path, bytes] = {}
        named: set[Path] = set()
        for path in paths:
            if path is None:
                continue
            _check_writable(path)
            if path.resolve() in named and _is_file_to_be(path):
                raise ValueError(f"{path}: two outputs cannot be the same file")
            named.add(path.resolve())

    def add(self, path: Path, content: str | bytes) -> None:
        self._contents[path] = content.encode() if isinstance(content, str) else content

    def commit(self) -> list[Path]:
        """Write everything beside its place, then move it there. Returns what has been written."""
        ready: list[tuple[Path, Path]] = []
        try:
            for path, content in self._contents.items():
                if _is_file_to_be(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    temporary = _beside(path)
                    ready.append((temporary, path.resolve()))
                    temporary.write_bytes(content)
            for path, content in self._contents.items():
                if not _is_file_to_be(path):
                    path.write_bytes(content)
            for temporary, path in ready:
                temporary.replace(path)
        finally:
            for temporary, _ in ready:
                temporary.unlink(missing_ok=True)
        return list(self._contents)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(21, "is a directory, not a file to write", str(path))
    folder = next(parent for parent in path.resolve().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PermissionError(13, "cannot be written there", str(path))
    if not _is_file_to_be(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "cannot be written there", str(path))
        return
    probe = folder / _beside(path).name  # the only way to know of names too long, and of odd file systems
    try:
        probe.touch()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        probe.unlink(missing_ok=True)


def _is_file_to_be(path: Path) -> bool:
    """Whether there is a file, or nothing yet: something to be replaced as a whole."""
    return path.is_file() or not path.exists()


def _beside(path: Path) -> Path:
    """A temporary file in the folder of what `path` is, or links to."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
