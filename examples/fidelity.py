"""How true the simulator is: the same requests live on this machine, twice, and in simulation.

    python -m examples.fidelity [--seconds 60] [--json FILE]

1. Measure this machine: operators, decode steps, and what prefills and decodes cost each other (engine/measure.py);
   once for disaggregated systems, where each has cores of its own, and once for co-located ones.
2. Scale the QwenTrace-like workload to it: lengths, and with them the systems' chunks and budgets, by --length-scale;
   SLOs by the time of 1,024 tokens so scaled, and for co-located systems ten times that: most of them serve in order of
   arrival, and Layered Prefill's targets are seconds.
3. Find each system's knee in simulation: the highest rate of which 90 % get their first token in time.
4. At .3, .6 and .8 of it, serve the same arrivals live, live again, and simulated: at the pace that the machine had
   right before each live run, measured on requests of its own.

The simulation's distance from the two live runs stands beside their own distance, below which no simulation can be
expected to come. Aim: TTFT and its attainment within 10 %, the times between tokens (TBT, over all tokens) within 15 %
where both share a device; or 1.5 times the live runs' own difference where that is more. Needs the machine for itself:
about three minutes for each system and load at 60 seconds a run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from engine.config import EngineConfig
from engine.deployment import profile
from engine.engine import Engine
from engine.machine import MachineProfile, MeasuredTiming, Pace, ThisMachine
from engine.measure import load_or_measure
from engine.measure_serving import measure_pace
from engine.metrics import RequestRows
from engine.simulation import simulate
from examples.arrivals import Arrival, scaled
from examples.backends import simulated_arrival
from examples.command import Outputs, Parser, items, positive, share
from examples.demo import warm_up
from examples.driving import run
from examples.fidelity_report import Comparison, Served, table
from examples.open_loop import replay
from examples.search import highest
from examples.slos import A800_1K_PREFILL
from examples.token_gaps import TokenGaps
from examples.workload import at_rate, open_workload
from models.decoder import Model
from models.load import load_model
from scheduling.batch import FillBudget, FillChunks, SLOAware
from scheduling.layered import Layered
from scheduling.plan import Chunked
from scheduling.presets import System, preset

DISAGGREGATED = ("distserve", "distserve-cp2k", "flowprefill")
COLOCATED = ("sarathi", "layered", "layby-colocated")
LOADS = (0.3, 0.6, 0.8)  # shares of the knee
TARGET = 0.9  # TTFT attainment at the knee
KNEE_REQUESTS = 400
KV_BYTES = 1 << 30
MAX_OUTPUT = 64
COLOCATED_SLO_SCALE = 10.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The model here, and what is known of its speed, with prefills and decodes apart or together. Live and simulated
    engines have the same configuration."""

    model: Model
    profile: MachineProfile
    config: EngineConfig
    length_scale: float

    @property
    def site(self) -> ThisMachine:
        return ThisMachine(self.model.config, self.profile, self.config, self.model.dtype)

    def system(self, name: str) -> System:
        """The preset, with what it counts in tokens scaled as the lengths are."""
        system = preset(name)
        batch, plan = system.batch, system.plan
        if isinstance(batch, FillBudget | FillChunks | SLOAware):
            batch = replace(batch, budget=round(batch.budget * self.length_scale))
        if isinstance(plan, Chunked):
            size, above = plan.size * self.length_scale, plan.above * self.length_scale
            plan = replace(plan, size=round(size), above=round(above))
        if isinstance(plan, Layered):
            chunk = None if plan.chunk is None else round(plan.chunk * self.length_scale)
            plan = replace(plan, work=round(plan.work * self.length_scale), chunk=chunk)
        return replace(system, batch=batch, plan=plan)

    def arrivals(self, n: int, rate: float) -> list[Arrival]:
        """`n` of the workload's, scaled to this machine."""
        workload = open_workload("qwen")
        slo = self.config.predictor([(0, round(1024 * self.length_scale))]) / A800_1K_PREFILL
        if self.config.system.colocated:
            slo *= COLOCATED_SLO_SCALE
        scale = self.length_scale
        return scaled(
            at_rate(workload.draw(n), workload, rate), prompt=scale, output=scale, max_output=MAX_OUTPUT, slo=slo
        )

    async def pace(self) -> Pace:
        return await measure_pace(self.model, self.config, self.profile)

    def at_pace(self, paces: Sequence[Pace]) -> Machine:
        """At the mean of these."""
        pace = Pace(mean(each.prefill for each in paces), mean(each.decode for each in paces))
        return replace(self, profile=self.profile.at_pace(pace))

    def simulated(self, system: System, arrivals: Sequence[Arrival]) -> Served:
        gaps = TokenGaps()
        rows = simulate(system, map(simulated_arrival, arrivals), self.site, sinks=[gaps])
        return Served.of(rows.rows, gaps)

    async def live(self, system: System, arrivals: Sequence[Arrival]) -> Served:
        engine = Engine(self.model, replace(self.config, system=system))
        await engine.start()
        await warm_up(engine)
        rows, gaps = RequestRows(), TokenGaps()
        engine.timeline.add(rows)
        engine.timeline.add(gaps)
        await replay(engine, arrivals, drain_seconds=arrivals[-1].time)
        await engine.stop()
        return Served.of(rows.rows, gaps)

    async def knee(self, system: System) -> float:
        """In requests per second, by simulation."""

        async def holds(rate: float) -> bool:
            # In a thread of its own: a virtual event loop does not run inside a real one.
            served = await asyncio.to_thread(self.simulated, system, self.arrivals(KNEE_REQUESTS, rate))
            return served.attainment >= TARGET

        edge = await highest(holds, 1.0)
        if edge.value is None:
            raise ValueError("no rate is low enough for 90 % of the first tokens to come in time")
        return edge.value


async def prepare(model: Model, name: str, length_scale: float, system: System, *, cached: bool) -> Machine:
    """For systems placed like `system`. Measured, or as it was measured last."""
    config = EngineConfig(system=system, kv_bytes=KV_BYTES)
    measured = await load_or_measure(model, name, config, fresh=not cached)
    predictor = profile(MeasuredTiming(measured, model.config.num_layers), model.config.num_layers)
    return Machine(model, measured, replace(config, predictor=predictor), length_scale)


def study(
    machines: Mapping[bool, Machine], systems: Sequence[str], loads: Sequence[float], seconds: float
) -> list[Comparison]:
    """`machines`: by whether it is for co-located systems."""
    comparisons: list[Comparison] = []
    for name in systems:
        machine = machines[preset(name).colocated]
        system = machine.system(name)
        knee = run(machine.knee(system))
        print(f"{name}: knee at {knee:.2f} requests/s", file=sys.stderr)
        for load in loads:
            rate = load * knee
            arrivals = machine.arrivals(max(10, round(rate * seconds)), rate)
            paces, live = [], []
            for _ in range(2):
                paces.append(run(machine.pace()))
                live.append(run(machine.live(system, arrivals)))
            print(f"pace {', '.join(f'{each.prefill:.3f} {each.decode:.3f}' for each in paces)}", file=sys.stderr)
            simulated = machine.at_pace(paces).simulated(system, arrivals)
            comparisons.append(Comparison.of(name, load, rate, live[0], live[1], simulated))
            print(table(comparisons[-1:], heading=len(comparisons) == 1), file=sys.stderr)
    return comparisons


def main() -> int:
    parser = Parser("fidelity", __doc__)
    parser.add_argument("--model", default="smollm2", help="toy, smollm2, a folder, or org/name of the hub")
    parser.add_argument("--systems", type=items(str), default=[*DISAGGREGATED, *COLOCATED])
    parser.add_argument("--loads", type=items(share), default=list(LOADS), help="shares of each system's knee")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of arrivals in each live run")
    parser.add_argument("--length-scale", type=share, default=0.125, help="of prompts, outputs, chunks and budgets")
    parser.add_argument("--cached", action="store_true", help="do not measure the machine again")
    parser.add_argument("--json", type=Path, help="write the comparisons, and the profile that they rest on")
    args = parser.parse_args()
    with parser.user_errors():
        for name in args.systems:
            preset(name)
        outputs = Outputs(args.json)
    model = load_model(args.model)
    machines: dict[bool, Machine] = {}
    for system in map(preset, args.systems):
        if system.colocated not in machines:
            prepared = prepare(model, args.model, args.length_scale, system, cached=args.cached)
            machines[system.colocated] = run(prepared)
    comparisons = study(machines, args.systems, args.loads, args.seconds)
    print(table(comparisons))
    if args.json is not None:
        profiles = [asdict(machine.profile) for machine in machines.values()]
        found = {"comparisons": [c.as_dict() for c in comparisons], "profiles": profiles}
        outputs.add(args.json, json.dumps(found, indent=1) + "\n")
        outputs.commit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
