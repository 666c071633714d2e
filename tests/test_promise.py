"""The promise: however prompts are cut, parked, batched and placed, each gets the tokens of one plain forward pass.

Random systems serve random requests on real models, on virtual time. Freed blocks are poisoned, so whatever reads a row
that is not its own shows.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from conftest import poison_freed_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.executor import Failed, Forwards, drive_on
from engine.gate import Gate
from engine.lab import Lab
from engine.sampling import Draw
from engine.virtual import VirtualLoop
from engine.work import Computed, Part, Work
from kv.cache import KVCache
from models.decoder import Model
from models.load import load_model
from scheduling.batch import Alone, FillBudget, FillChunks, FillSequences, SLOAware
from scheduling.layered import Layered
from scheduling.order import EDF, FCFS, SEDF, SJF
from scheduling.placement import Disaggregated, Exclusive, Interleave, Piggyback, RequestLevel
from scheduling.plan import Chunked, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System
from scheduling.request import SLO, Sampling

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 40, 90)
OUTPUTS = 5  # tokens that are compared, of each request
CLEAR = 1e-3  # by how much a token must win: less may fall either way, as sums are rounded in another order

model_of = cache(load_model)


def prompt(tokens: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist())


def next_token(model: Model, tokens: list[int]) -> int:
    """By one plain forward pass over all of `tokens`: no cache from before, no chunks, no groups, no neighbours."""
    config, clock = model.config, VirtualLoop()
    blocks = -(-len(tokens) // BLOCK)
    cache = KVCache(config.num_layers, blocks, BLOCK, config.num_kv_heads, config.head_dim, model.cache_dtype)
    draw = Draw(Sampling(logprobs=2), seed=0, index=0, position=len(tokens))
    part = Part(tokens, 0, tuple(range(blocks)), (draw,))
    with torch.inference_mode():
        reply = drive_on(
            Forwards(model, cache).drive(0, Work(config.num_layers, (part,), last=config.num_layers), Gate()), clock
        )
    clock.close()
    assert not isinstance(reply, Failed) and isinstance(reply.value, Computed), reply
    ((sampled,),) = reply.value.prefill
    (first, second) = sampled.top
    assert first[1] - second[1] > CLEAR, f"token {len(tokens)} is a close call; draw another prompt"
    return sampled.token


@cache
def plain(name: str, tokens: int) -> list[int]:
    """The continuation of `prompt(tokens)`, token by token."""
    sequence = list(prompt(tokens))
    for _ in range(OUTPUTS):
        sequence.append(next_token(model_of(name), sequence))
    return sequence[-OUTPUTS:]


# Systems: every combination of answers that is not refused

orders = st.sampled_from([FCFS(), SJF(), EDF(), SEDF()])
sizes = st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 40, 100])
whole = st.tuples(
    st.one_of(
        st.just(Alone()), st.builds(FillBudget, sizes), st.builds(SLOAware, sizes), st.builds(FillSequences, sizes)
    ),
    st.just(Whole()),
)
chunked = sizes.flatmap(
    lambda size: st.tuples(
        st.one_of(
            st.just(Alone()),
            st.builds(SLOAware, sizes),
            st.builds(FillChunks, st.integers(size, 150), decodes_count=st.booleans()),
        ),
        st.just(Chunked(size)),
    )
)
layered = st.tuples(
    st.one_of(st.just(Alone()), st.builds(FillBudget, sizes), st.builds(SLOAware, sizes)),
    st.builds(
        Layered,
        sizes,
        chunk=st.one_of(st.none(), sizes),
        fixed_groups=st.one_of(st.none(), st.integers(1, 4)),  # toy has four layers, toy-moe six
    ),
)
cuts = st.one_of(whole, chunked, layered)
placements = st.one_of(
    st.just(Disaggregated()),
    st.just(Piggyback()),
    st.builds(Exclusive, decode_between=st.booleans()),
    st.builds(Interleave, quantum=st.sampled_from([0.002, 0.05]), yields=st.sampled_from(["ttft", "tbt"])),
    st.just(RequestLevel()),
)


@st.composite
def systems(draw: st.DrawFn) -> System:
    (batch, plan), placement = draw(cuts), draw(placements)
    levels = [Preempt.NEVER, Preempt.SLICE, Preempt.LAYER, Preempt.HALF_LAYER, Preempt.OPERATOR]
    if isinstance(plan, Whole):
        levels.append(Preempt.RESTART)
    if isinstance(placement, Piggyback):
        levels = [Preempt.NEVER, Preempt.SLICE]
    elif isinstance(placement, RequestLevel):
        levels = [Preempt.NEVER]
    elif isinstance(placement, Interleave):
        levels = [Preempt.LAYER, Preempt.HALF_LAYER, Preempt.OPERATOR]
    return System(draw(orders), batch, plan, draw(st.sampled_from(levels)), placement)


arrivals = st.lists(
    st.tuples(
        st.sampled_from(LENGTHS),
        st.floats(0, 0.4),  # when it comes; a prompt of 90 tokens takes 0.2 s
        st.sampled_from([0.05, 0.5, 5.0, None]),  # its TTFT target
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.parametrize("name", ["toy", "toy-moe"])
@settings(max_examples=25)
@given(systems(), arrivals, st.sampled_from([24, 400]))
def test_any_system_gives_the_tokens_of_one_plain_forward(
    name: str, system: System, arrivals: list[tuple[int, float, float | None]], blocks: int
) -> None:
    """Also where so few blocks are there that requests wait, or are computed again."""
    with Lab(system, model=model_of(name), config=EngineConfig(num_blocks=blocks, block_size=BLOCK)) as lab:
        poison_freed_blocks(lab)
        requests = {}

        def submit(number: int, tokens: int, ttft: float | None) -> None:
            slo, sampling = SLO(ttft=ttft, tbt=0.05), Sampling(max_tokens=OUTPUTS, ignore_eos=True)
            requests[number] = lab.submit(prompt(tokens), slo=slo, sampling=sampling)

        for number, (tokens, time, ttft) in enumerate(arrivals):
            lab.loop.call_at(time, submit, number, tokens, ttft)
        lab.run()
        lab.check()
        assert lab.engine.idle
        assert {number: lab.outputs(request) for number, request in requests.items()} == {
            number: plain(name, tokens) for number, (tokens, _, _) in enumerate(arrivals)
        }


@pytest.mark.parametrize("name", ["toy", "toy-moe"])
@pytest.mark.parametrize("tokens", [BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_a19_chunks_of_any_size_give_the_same_logits(name: str, tokens: int) -> None:
    """Case A19. Beside a decode that shares their passes, to the last bit that another order of summing leaves."""

    def logprobs(plan: Chunked | Whole) -> torch.Tensor:
        """Of the whole vocabulary, for the first token and two more."""
        model = model_of(name)
        found: list[torch.Tensor] = []
        with Lab(System(FCFS(), Alone(), plan, Preempt.SLICE, Piggyback()), model=model) as lab:
            poison_freed_blocks(lab)
            lab.submit(prompt(20), sampling=Sampling(max_tokens=60, ignore_eos=True))
            lab.step_until("token")
            everything = Sampling(max_tokens=3, ignore_eos=True, logprobs=model.config.vocab_size)
            request = lab.submit(prompt(tokens), sampling=everything)
            lab.run()
            assert request.outputs is not None
            while (output := request.outputs.get_nowait()) is not None:
                assert not isinstance(output, Exception)
                found.append(torch.tensor([value for _, value in sorted(output.top)]))
        return torch.stack(found)

    whole = logprobs(Whole())
    assert whole.shape == (3, model_of(name).config.vocab_size)
    for size in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        torch.testing.assert_close(logprobs(Chunked(size)), whole, atol=1e-4, rtol=0)
