"""An order of your own, in ten lines: python server.py --order examples.my_order:ShortestFirst"""

from dataclasses import dataclass

from scheduling.order import Candidate, Order, Rank


@dataclass(frozen=True)
class ShortestFirst(Order):
    """Requests of fewer tokens first; `now`, the deadline and the predicted time are there as well."""

    def rank(self, candidate: Candidate, now: float) -> Rank:
        return 0, len(candidate.request.prompt)
