"""Carry out one run: simulated, or live on this machine. Either gives the same record (examples/results.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engine import simulation
from engine.config import EngineConfig
from engine.engine import Engine
from engine.metrics import RequestRows
from engine.options import torch_device
from engine.profile import load_or_measure
from engine.simulation import Deployment, simulate
from examples.arrivals import Arrival
from examples.demo import calibrate, warm_up
from examples.experiment import Live, Run, Variant
from examples.open_loop import replay
from examples.results import Busy, Record, fold_run
from models.decoder import Model
from models.load import load_model
from scheduling.predictor import Predictor

KV_BYTES = 1 << 30  # of a live engine
DRAIN = 0.5  # of the seconds of arrivals: how long a live run waits for those behind


def simulated(run: Run) -> Record:
    """In virtual time, until the last request has ended. Any process can do it."""
    assert isinstance(run.backend, Deployment)
    rows, busy = play(run.variant, run.load.arrivals(run.rate, run.slo_scale, run.seed), run.backend)
    return {**run.identity, **fold_run(rows, busy)}


def play(variant: Variant, arrivals: Sequence[Arrival], deployment: Deployment) -> tuple[RequestRows, Busy]:
    busy = Busy()
    return simulate(variant.system, map(simulated_arrival, arrivals), deployment, sinks=[busy]), busy


def simulated_arrival(arrival: Arrival) -> simulation.Arrival:
    return simulation.Arrival(arrival.time, arrival.prompt_tokens, arrival.output_tokens, arrival.label, arrival.slo)


@dataclass(frozen=True, slots=True)
class Machine:
    """The model that live runs share, and how fast it is here."""

    live: Live
    model: Model
    predictor: Predictor

    @classmethod
    def prepare(cls, live: Live) -> Machine:
        """Load the model and measure its prefill (or look its profile up). ValueError for a device that is not here."""
        model = load_model(live.model, device=torch_device(live.device))
        return cls(live, model, load_or_measure(model, live.model, EngineConfig().threads()[0]).predictor())

    def engine(self, variant: Variant) -> Engine:
        config = EngineConfig(
            system=variant.system,
            predictor=self.predictor,
            prefill_instances=self.live.prefill_instances,
            decode_instances=self.live.decode_instances,
            kv_bytes=KV_BYTES,
        )
        return Engine(self.model, config)

    async def calibrated(self, variant: Variant, arrivals: Sequence[Arrival]) -> Machine:
        """With what decodes beside the prefills cost them; a profile is taken without."""
        predictor = await calibrate(self.engine(variant), self.predictor, arrivals)
        return Machine(self.live, self.model, predictor)

    async def run(self, run: Run) -> Record:
        """Open loop, in real time, on an engine of its own; what is late is aborted, and a miss."""
        arrivals = run.load.arrivals(run.rate, run.slo_scale, run.seed)
        engine = self.engine(run.variant)
        await engine.start()
        await warm_up(engine)
        rows, busy = RequestRows(), Busy()
        engine.timeline.add(rows)
        engine.timeline.add(busy)
        await replay(engine, arrivals, drain_seconds=max(2.0, DRAIN * arrivals[-1].time))
        await engine.stop()
        await asyncio.sleep(0)
        return {**run.identity, **fold_run(rows, busy)}
