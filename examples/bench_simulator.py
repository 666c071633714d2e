"""How fast the simulator is, and that its memory does not grow with the requests it has finished.

    python -m examples.bench_simulator [--requests 100000] [--rate 7.6]

One run of 1P1D `flowprefill` on one core: Llama3-8B on A800, QwenTrace-like requests at the knee, the highest rate of
which 90 % get their first token in time. Rows are folded as they come. Prints one JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from engine.metrics import RequestRows, Row
from engine.simulation import Deployment, simulate
from examples.backends import simulated_arrival
from examples.command import Parser, count, positive
from examples.workload import at_rate, open_workload
from scheduling.presets import PRESETS, preset

PARTS = 10  # of the run, at the end of which memory is looked at


class Progress:
    """Takes each request's row as it ends, and keeps only counts and the memory at each tenth of the run."""

    def __init__(self, requests: int) -> None:
        self.met = self.seen = 0
        self.resident_mb: list[float] = []
        self._every = max(1, requests // PARTS)

    def __call__(self, row: Row) -> None:
        self.seen += 1
        self.met += row.meets_ttft is True
        if self.seen % self._every == 0:
            self.resident_mb.append(round(resident_bytes() / 1e6, 1))


def resident_bytes() -> int:
    """Memory of this process, on Linux; 0 where it cannot be known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def measure(requests: int, rate: float, system: str) -> dict[str, object]:
    workload = open_workload("qwen")
    arrivals = at_rate(workload.draw(requests), workload, rate)
    progress = Progress(requests)
    wall, cpu = time.perf_counter(), time.process_time()
    simulate(preset(system), map(simulated_arrival, arrivals), Deployment(), rows=RequestRows(progress))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "system": system,
        "requests": progress.seen,
        "rate": rate,
        "ttft_attainment": round(progress.met / progress.seen, 4),
        "seconds": round(wall, 2),
        "requests_per_s": round(progress.seen / wall),
        "requests_per_cpu_s": round(progress.seen / cpu),
        "resident_mb": progress.resident_mb,
    }


def main() -> int:
    parser = Parser("bench_simulator", __doc__)
    parser.add_argument("--requests", type=count, default=100_000)
    parser.add_argument("--rate", type=positive, default=7.6, help="requests per second")
    parser.add_argument("--system", default="flowprefill", choices=tuple(PRESETS))
    args = parser.parse_args()
    print(json.dumps(measure(args.requests, args.rate, args.system), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
