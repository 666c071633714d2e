"""A model of ours and one of transformers with the same random weights, and ways to run ours without an engine."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch
from conftest import poison
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.gate import Gate
from kv.cache import KVCache
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Model

T = TypeVar("T")

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VOCAB = 160
BLOCK = 4


def hf_json(kind: str, **changes: Any) -> dict[str, Any]:
    """A tiny config of one family, as transformers writes it to config.json."""
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    config = AutoConfig.for_model(kind, **(shape | changes))
    config.architectures = [ARCHITECTURES[kind]]
    written: dict[str, Any] = json.loads(config.to_json_string())
    return written


def pair(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[PreTrainedModel, Model]:
    """transformers' model and ours, filled with the same weights.

    They are large enough that every operator moves the logits, biases and norms included: with transformers' own
    initial values a wrong attention would hide behind the embedding.
    """
    written = hf_json(kind, **changes)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written), attn_implementation="sdpa").eval()
    ours = Model(ModelConfig.from_hf(written), dtype)
    generator = torch.Generator().manual_seed(0)
    state = theirs.state_dict()
    with torch.no_grad():
        for weight in theirs.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 1 + 0.5 * noise)
        for name, target in ours.parameters_wanted(fused_experts=True).items():
            assert target.shape == state[name].shape, name
            target.copy_(state[name])
    return theirs, ours


def drive(forward: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that nobody parks."""
    try:
        forward.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("parked, though nobody asked")


def poisoned_cache(model: Model, blocks: int = 160) -> KVCache:
    """A cache that holds nothing but NaN: whatever is read before it is written shows in the logits."""
    shape = model.config
    cache = KVCache(shape.num_layers, blocks, BLOCK, shape.num_kv_heads, shape.head_dim, model.cache_dtype)
    poison(cache, list(range(blocks)))
    return cache


@torch.inference_mode()
def logits(model: Model, batch: Batch) -> torch.Tensor:
    """Of all rows of a batch, [rows, vocab]."""
    return model.head(drive(model.run_layers(model.embed(batch.tokens), 0, len(model.layers), batch, Gate())))


@torch.inference_mode()
def reference(theirs: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits of all tokens of one sequence, [tokens, vocab]."""
    result: torch.Tensor = theirs(torch.tensor([list(tokens)])).logits[0]
    return result


def prompt(tokens: int, seed: int = 0) -> list[int]:
    drawn: list[int] = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


class Sequences:
    """Block tables of some sequences, dealt out of order from one cache, so that none has consecutive blocks."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], cache: KVCache | None = None) -> None:
        self.cache = cache or poisoned_cache(model)
        self.prompts = prompts
        free = list(range(self.cache.num_blocks))
        self.tables: list[list[int]] = [[] for _ in prompts]
        for _ in range(max(-(-len(one) // BLOCK) for one in prompts)):
            for table in self.tables:
                table.append(free.pop())

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        """Rows of a forward pass: (sequence, first token, last token exclusive) in row order."""
        rows = ((self.prompts[one][start:stop], start, self.tables[one]) for one, start, stop in parts)
        return Batch.build(self.cache, rows)
