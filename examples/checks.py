"""Is what a device computes right? Each check compares with something plainer and returns figures, `passed` among them.

They take a model's name and a device's, and run inside torch.inference_mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import Finished, Parked
from engine.gate import Gate
from engine.metrics import RequestRows
from examples.driving import BLOCK_SIZE, Driver, run
from kv.cache import KVCache
from models.attention import BACKENDS, default_backend, plan_attention
from models.batch import Batch
from models.config import ModelConfig
from models.decoder import Model
from models.load import load_model
from scheduling.presets import PRESETS, preset
from scheduling.request import SLO, Sampling

TOLERANCE = 1e-4  # between float32 logits
ATTENTION_BLOCK = 256  # a size that every attention backend can page by
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 200)  # of the prompts compared

# One tiny config of each family; the differences that matter: biases, q/k norms, tied embeddings, RoPE scaling.
TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama3": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}


def tiny_model(family: str, device: torch.device | str) -> Model:
    """A random float32 model of that family: the same weights on every device."""
    model = Model(ModelConfig.from_hf(TINY | FAMILIES[family]), torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    for view in model.parameters_wanted().values():
        noise = torch.randn(view.shape, generator=generator)
        view.copy_(1 + 0.1 * noise if noise.dim() == 1 else noise / noise.shape[-1] ** 0.5)
    return model


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


class Sequences:
    """Some sequences in a cache of their own, computed step by step."""

    def __init__(self, model: Model, count: int, tokens: int) -> None:
        config = model.config
        self.model = model
        self.each = -(-tokens // BLOCK_SIZE)
        shape = (BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.cache = KVCache(config.num_layers, count * self.each, *shape, model.cache_dtype, model.device)

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        """(sequence, new tokens, context) of each -> logits behind its last token, on the CPU [parts, vocab]."""
        model = self.model
        blocks = [range(i * self.each, (i + 1) * self.each) for i, _, _ in parts]
        new = [(tokens, context, table) for (_, tokens, context), table in zip(parts, blocks, strict=True)]
        batch = Batch.build(self.cache, new)
        work = model.run_layers(model.embed(batch.tokens), 0, model.config.num_layers, batch, Gate())
        try:
            work.send(None)
        except StopIteration as done:
            logits: torch.Tensor = model.head(done.value[batch.last_rows]).cpu()
            return logits
        raise RuntimeError("nobody asked this forward pass to park")


def plain(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits behind one whole sequence, computed alone and in one piece. [vocab]"""
    return Sequences(model, 1, len(tokens)).step([(0, tokens, 0)])[0]


def served(model: Model, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits behind the sequences as an engine computes them: a cohort, a later chunk, and a decode step of all.

    The last token of each is decoded; of the longest, a chunk is left for a second slice. [sequences, vocab]
    """
    cache = Sequences(model, len(sequences), max(map(len, sequences)) + 1)
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
    half = len(sequences[longest]) // 2
    first = [(i, s[:half] if i == longest else s[:-1], 0) for i, s in enumerate(sequences) if len(s) > 1]
    cache.step(first)
    cache.step([(longest, sequences[longest][half:-1], half)])
    return cache.step([(i, sequence[-1:], len(sequence) - 1) for i, sequence in enumerate(sequences)])


def attention(model_name: str, device: str) -> dict[str, Any]:
    """Every backend that runs here, in every dtype it takes, against a float32 softmax(q k) v on the CPU."""
    errors: dict[str, float | str] = {}
    defaults = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        defaults[name] = default_backend(torch.device(device), dtype, ATTENTION_BLOCK)
        for backend in BACKENDS:
            try:
                errors[f"{backend} {name}"] = attention_error(backend, dtype, device)
            except Exception as error:
                errors[f"{backend} {name}"] = f"not here: {error}".splitlines()[0][:120]
    limits = {"float32": TOLERANCE, "bfloat16": 4e-2}
    right = [error <= limits[key.split()[1]] for key, error in errors.items() if isinstance(error, float)]
    used = [isinstance(errors[f"{backend} {name}"], float) for name, backend in defaults.items()]
    return {"passed": all(right) and all(used), "max_error": errors, "default": defaults, "tolerance": limits}


def attention_error(backend: str, dtype: torch.dtype, device: str) -> float:
    """The largest error over a decode row, a prompt, and a chunk behind a context."""
    heads, kv_heads, head_dim = 4, 2, 64
    cache = KVCache(1, 6, ATTENTION_BLOCK, kv_heads, head_dim, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for tensor in (cache.key[0], cache.value[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    shapes = ((1, 300, (4, 1)), (200, 0, (2,)), (50, 400, (5, 0)))  # new rows, context, blocks
    batch = Batch.build(cache, [([0] * rows, context, blocks) for rows, context, blocks in shapes])
    q = torch.randn(len(batch.tokens), heads, head_dim, generator=generator).to(device, dtype)
    out = plan_attention(batch, backend)(q, 0).float().cpu()
    worst = 0.0
    for span in batch.spans:
        rows = slice(span.start, span.stop)
        key, value = (t[list(span.blocks)].flatten(0, 1)[: span.length] for t in (cache.key[0], cache.value[0]))
        key, value = (t.float().cpu().repeat_interleave(heads // kv_heads, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float().cpu(), key) / head_dim**0.5
        future = torch.ones(span.rows, span.length, dtype=torch.bool).triu(span.context + 1)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value)
        worst = max(worst, float((out[rows] - expected).abs().max()))
    return worst


def parity(model_name: str, device: str) -> dict[str, Any]:
    """Served on the device, against a plain forward pass of the same weights on the CPU."""
    errors = {}
    for family in FAMILIES:
        here, on_cpu = tiny_model(family, device), tiny_model(family, "cpu")
        given = prompts(here.config.vocab_size)
        expected = torch.stack([plain(on_cpu, prompt) for prompt in given])
        errors[family] = float((served(here, given) - expected).abs().max())
    return {"passed": max(errors.values()) <= TOLERANCE, "max_logit_error": errors, "tolerance": TOLERANCE}


def against_transformers(model_name: str, device: str) -> dict[str, Any]:
    """A plain forward pass on the device, against transformers on the same device."""
    try:
        from transformers import AutoModelForCausalLM

        from examples.bench_prefill import hf_config
    except ImportError as error:
        return {"passed": True, "skipped": f"transformers cannot be imported: {error}"}
    errors = {}
    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family, device)
        from_config: Any = AutoModelForCausalLM.from_config
        theirs = from_config(hf_config(model.config), dtype=torch.float32).eval()
        theirs.load_state_dict(model.parameters_wanted(), strict=False)
        theirs.tie_weights()
        theirs.to(device)
        given = prompts(model.config.vocab_size)
        expected = [theirs(torch.tensor([prompt], device=device)).logits[0, -1].cpu() for prompt in given]
        errors[family] = float((served(model, given) - torch.stack(expected)).abs().max())
    return {"passed": max(errors.values()) <= TOLERANCE, "max_logit_error": errors, "tolerance": TOLERANCE}


class ParkAt(Gate):
    """Before the device's own gate: asks it to park at one boundary, counted from 1."""

    __slots__ = ("_boundary", "_gate")

    def __init__(self, gate: Gate, boundary: int) -> None:
        super().__init__(gate.level)
        self._gate = gate
        self._boundary = boundary

    def operator(self, name: str) -> Gate:
        gate = self._gate.operator(name)
        if gate.passed == self._boundary:
            gate.park_requested = True
        return gate

    def drain(self) -> None:
        self._gate.drain()


def parks(model_name: str, device: str) -> dict[str, Any]:
    """Park at every boundary in turn, let another prefill pass, resume: bitwise the result of never parking."""

    async def measure(name: str, tokens: int) -> dict[str, Any]:
        driver = Driver(load_model(name, device=device), 2 * tokens)
        prompt, other = driver.prompt(tokens), driver.prompt(tokens, seed=1)

        async def value(boundary: int) -> Any:
            gate = driver.gate()
            drive = driver.prefill(prompt, ParkAt(gate, boundary))
            drive.gate = gate
            reply = await driver.drive(drive)
            if isinstance(reply, Parked):
                passing = driver.prefill(other, driver.gate(), first_block=-(-tokens // BLOCK_SIZE))
                await driver.drive(passing)
                driver.resume(drive)
                reply = await driver.reply()
            assert isinstance(reply, Finished)
            return reply.value

        never = await value(0)
        differ = [boundary for boundary in range(1, driver.gates + 1) if await value(boundary) != never]
        await driver.close()
        return {"boundaries": driver.gates, "differ_at": differ}

    figures = {name: run(measure(name, 48)) for name in dict.fromkeys(("toy", model_name))}
    return {"passed": not any(each["differ_at"] for each in figures.values()), **figures}


def engine(model_name: str, device: str) -> dict[str, Any]:
    """The same requests through the engine under every system: each finishes, with the same tokens."""
    model = load_model("toy", device=device)

    async def tokens_of(system: str) -> tuple[list[list[int]], RequestRows]:
        served_by = Engine(model, EngineConfig(system=preset(system), num_blocks=2048))
        rows = RequestRows()
        served_by.timeline.add(rows)
        await served_by.start()

        async def one(turn: int, length: int) -> list[int]:
            await asyncio.sleep(0.003 * turn)
            prompt = [7 * i % 256 for i in range(length)]
            slo = SLO(ttft=1e-2 * length)  # the later and shorter, the more urgent
            request = served_by.submit(prompt, sampling=Sampling(max_tokens=8, ignore_eos=True), slo=slo)
            return [output.token async for output in served_by.stream(request) if output.token is not None]

        streams = await asyncio.gather(*(one(*each) for each in enumerate((1200, 600, 300, 100, 30))))
        await served_by.stop()
        return streams, rows

    found = {system: run(tokens_of(system)) for system in PRESETS}
    streams = [streams for streams, _ in found.values()]
    complete = all(len(tokens) == 8 for each in streams for tokens in each)
    return {
        "passed": complete and all(each == streams[0] for each in streams),
        "systems": list(found),
        "parks": {system: rows.blocking.n for system, (_, rows) in found.items()},
    }
