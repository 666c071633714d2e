"""How much memory loading a checkpoint takes: `python -m examples.load_memory`, on Linux.

Writes a random Llama of about --megabytes in shards of 250 MB, loads it in a fresh process, and prints one JSON.
`anonymous_bytes` is the most that process held in RssAnon, Python and torch included: the file's own pages are mapped
and can be dropped, so it should be little more than the weights themselves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.checkpoint import INDEX
from models.config import ModelConfig
from models.decoder import Model
from models.load import load_model

SHARD_BYTES = 250_000_000
SLACK_BYTES = 200_000_000  # the interpreter, torch and its thread pools


def write_random_checkpoint(folder: Path, megabytes: int) -> int:
    """A bfloat16 Llama of random weights with an index. Returns the bytes of all its tensors."""
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": max(1, round((megabytes - 134) / 31)),  # 134 MB of embeddings, 31 MB a layer
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "vocab_size": 32_768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(hf_config))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = shards = 0
    wanted = Model(ModelConfig.from_hf(hf_config), torch.bfloat16).parameters_wanted()
    for index, (name, view) in enumerate(wanted.items()):
        shard[name] = torch.empty(view.shape, dtype=view.dtype).uniform_(-0.05, 0.05, generator=generator)
        held += shard[name].nbytes
        if held >= SHARD_BYTES or index == len(wanted) - 1:
            shards += 1
            file = f"model-{shards:05}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            total, held, shard = total + held, 0, {}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return total


def peak_of_loading(folder: Path) -> int:
    """Load the model in this process; the most anonymous memory it held on the way, in bytes."""
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, dtype="bfloat16")
    peak = max(peak, anonymous_bytes())
    done.set()
    watcher.join()
    del model
    return peak


def anonymous_bytes() -> int:
    """RssAnon of this process: memory in use that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status: this example needs Linux")


def measure(megabytes: int) -> dict[str, int]:
    """Write, load in a fresh process, and compare with the bound: 1.1 times the weights plus 200 MB."""
    with tempfile.TemporaryDirectory() as folder:
        total = write_random_checkpoint(Path(folder), megabytes)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(peak_of_loading, (Path(folder),))
    return {"checkpoint_bytes": total, "anonymous_bytes": peak, "bound_bytes": int(1.1 * total) + SLACK_BYTES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the checkpoint (default 2000)")
    print(json.dumps(measure(parser.parse_args().megabytes)))


if __name__ == "__main__":
    main()
