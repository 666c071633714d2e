"""How fast is one forward pass, beside transformers on the same weights and threads?

    python -m examples.bench_prefill --model smollm2 --json out/bench_prefill.json

Prefill: one prompt, logits of its last row. Decode: one token for each of `batch` sequences behind `--context` tokens.
transformers runs its SDPA attention with a KV cache and `logits_to_keep=1`, in float32 and in bfloat16, and the better
of the two counts. Ours runs as it is served: blocks, gates and all. The contestants take turns, round after round, so
that a busy moment of the machine hits them alike; figures are medians over the rounds. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.gate import Gate
from kv.cache import KVCache
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Model
from models.load import load_model

PREFILL_TOKENS = (128, 512, 1024, 4096)
DECODE_BATCHES = (1, 8)
DECODE_STEPS = 8  # timed together
BLOCK_SIZE = 16

T = TypeVar("T")
Call = Callable[[], None]


class Ours:
    """Layby's model, driven the way an executor drives it."""

    def __init__(self, model: Model, max_tokens: int) -> None:
        config = model.config
        self.model = model
        self.blocks = -(-max_tokens // BLOCK_SIZE)
        shape = (BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.cache = KVCache(config.num_layers, self.blocks, *shape, model.cache_dtype, model.device)

    def prefill(self, tokens: list[int]) -> None:
        self._step([(tokens, 0, range(self.blocks))])

    def decode(self, prompts: list[list[int]]) -> Call:
        """Prefill each prompt; what comes back takes `DECODE_STEPS` steps further on every call."""
        each = self.blocks // len(prompts)
        tables = [range(i * each, (i + 1) * each) for i in range(len(prompts))]
        context = len(prompts[0])
        latest = [self._step([(tokens, 0, table)])[0] for tokens, table in zip(prompts, tables, strict=True)]

        def steps() -> None:
            nonlocal latest, context
            for _ in range(DECODE_STEPS):
                latest = self._step([([token], context, table) for token, table in zip(latest, tables, strict=True)])
                context += 1

        return steps

    def _step(self, parts: list[tuple[list[int], int, range]]) -> list[int]:
        model = self.model
        batch = Batch.build(self.cache, parts)
        x = _finish(model.run_layers(model.embed(batch.tokens), 0, model.config.num_layers, batch, Gate()))
        return model.head(x[batch.last_rows]).argmax(-1).tolist()


class Theirs:
    """transformers with the same weights, in one dtype."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.device = model.device
        config = hf_config(model.config)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa"
        )
        weights = {name: view.to(dtype) for name, view in model.parameters_wanted().items()}
        missing, unexpected = self.model.load_state_dict(weights, strict=False, assign=True)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.model.tie_weights()
        self.model.to(self.device).eval()

    def prefill(self, tokens: list[int]) -> None:
        self._step([tokens], None)

    def decode(self, prompts: list[list[int]]) -> Call:
        latest, cache = self._step(prompts, None)

        def steps() -> None:
            nonlocal latest
            for _ in range(DECODE_STEPS):
                latest, _ = self._step([[token] for token in latest], cache)

        return steps

    def _step(self, tokens: list[list[int]], cache: Any) -> tuple[list[int], Any]:
        ids = torch.tensor(tokens, device=self.device)
        out = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1).tolist(), out.past_key_values


def hf_config(config: ModelConfig) -> Any:
    """The transformers config of the same model."""
    if config.rope.kind != "default":
        raise ValueError(f"the comparison covers models with default RoPE only, this one has {config.rope.kind}")
    kind = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}[config.architecture]
    return AutoConfig.for_model(
        kind,
        num_hidden_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _finish(forward: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that no gate stops."""
    try:
        forward.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise RuntimeError("nobody asked this forward pass to park")


def take_turns(contestants: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, call in contestants.items():
            began = perf_counter()
            call()
            if turn:
                seconds[name].append(perf_counter() - began)
    return {name: median(values) for name, values in seconds.items()}


def row(tokens: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Tokens per second of ours and of the better of theirs."""
    ours = seconds.pop("ours")
    best = min(seconds, key=seconds.__getitem__)
    return {
        "tokens_per_s": tokens / ours,
        "transformers_tokens_per_s": tokens / seconds[best],
        "ratio": seconds[best] / ours,
        "transformers_dtype": best,
    }


def bench(model: Model, context: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def prompt(tokens: int) -> list[int]:
        return torch.randint(model.config.vocab_size, (tokens,), generator=generator).tolist()

    decoded = DECODE_STEPS * (5 * rounds + 1) + 1
    ours = Ours(model, max(max(PREFILL_TOKENS), max(DECODE_BATCHES) * (context + decoded + BLOCK_SIZE)))
    everyone: dict[str, Ours | Theirs] = {"ours": ours}
    for name in ("bfloat16", "float32"):
        everyone[name] = Theirs(model, getattr(torch, name))
    result: dict[str, Any] = {"prefill": {}, "decode": {}}
    for tokens in PREFILL_TOKENS:
        ids = prompt(tokens)
        calls: dict[str, Call] = {name: partial(one.prefill, ids) for name, one in everyone.items()}
        result["prefill"][str(tokens)] = row(tokens, take_turns(calls, max(rounds, min(5 * rounds, 8192 // tokens))))
        show("prefill", tokens, result)
    for batch in DECODE_BATCHES:
        prompts = [prompt(context) for _ in range(batch)]
        calls = {name: one.decode(prompts) for name, one in everyone.items()}
        result["decode"][str(batch)] = row(batch * DECODE_STEPS, take_turns(calls, 5 * rounds))
        show("decode", batch, result)
    return result


def show(kind: str, size: int, result: dict[str, Any]) -> None:
    figures = result[kind][str(size)]
    print(
        f"{kind:8}{size:6}{figures['tokens_per_s']:10.1f} tokens/s, transformers"
        f"{figures['transformers_tokens_per_s']:10.1f} ({figures['transformers_dtype']}): {figures['ratio']:.2f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    parser.add_argument("--context", type=int, default=512, help="tokens before the decoded ones (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the longest prefill; short ones get more")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    with torch.inference_mode():
        result = bench(model, args.context, args.rounds)
    result |= {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": args.device,
        "threads": args.threads,
        "decode_context": args.context,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
