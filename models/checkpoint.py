"""The weights of a Hugging Face folder, by name, read through a memory map."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NO_PICKLES = "pickled weights (.bin, .pt) can run code and are not read"


class CheckpointError(ValueError):
    """A folder is not a model that can be loaded. Says which file, key or tensor, and what would be right."""


class Checkpoint(Mapping[str, torch.Tensor]):
    """Tensor name -> tensor on the CPU, a view of the file's pages: nothing is read before it is copied elsewhere.

    Where the folder has an index, exactly the tensors that it names exist here, each from the file it names: other
    files, and other tensors of those files, are not looked at. CheckpointError names what is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {file: _open(folder / file) for file in weight_files(folder)}
        if (folder / INDEX).is_file():
            self._file_of = _weight_map(folder)
        else:
            self._file_of = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file}: cannot read tensor {name}: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights: those in the index, else model.safetensors. They need not exist."""
    if (folder / INDEX).is_file():
        return sorted(set(_weight_map(folder).values()))
    return [SINGLE]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. CheckpointError if there is no such file, or it holds something else."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no {path.name}; a model folder in Hugging Face's layout is needed")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, got a {type(content).__name__}")
    return content


def _weight_map(folder: Path) -> dict[str, str]:
    content = read_json(folder / INDEX).get("weight_map")
    if not isinstance(content, dict) or not content or not all(isinstance(file, str) for file in content.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must name the file of every tensor")
    outside = next((file for file in content.values() if Path(file).name != file), None)
    if outside is not None:
        raise CheckpointError(f"{folder / INDEX}: weight_map must name files of this folder, got {outside!r}")
    return content


def _open(path: Path) -> Any:
    """A memory-mapped safetensors file (safetensors names no type for it)."""
    if not path.is_file():
        pickles = any(path.parent.glob("*.bin")) or any(path.parent.glob("*.pt*"))
        hint = f"; {NO_PICKLES}: convert them to safetensors" if pickles else ""
        raise CheckpointError(f"{path.parent}: weight file {path.name} is missing{hint}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error
