"""The fields of a trace, read one by one; what is wrong with one is told with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isfinite, nan
from pathlib import Path
from re import compile
from typing import Any

from scheduling.request import SLO

_DATE = compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:Z|[+-]\d\d:\d\d)?")
MOST_TOKENS = 100_000_000  # of a prompt or an output; more is a mistake, and a client could not even hold it
LATEST = 1e13  # as written; milliseconds since 1970 are below, and beyond it floating point is too coarse for arrivals
_ORIGIN = datetime(2020, 1, 1)  # near enough that seconds since then still tell 100 nanoseconds apart


class TraceError(ValueError):
    """What is wrong, and where. `field` may be empty, where a whole line or file is meant."""

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        place = f"{path}, line {line}" + (f", {field}" if field else "")
        super().__init__(f"{place}: {problem}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: what its errors name."""

    path: Path
    line: int

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(self.path, self.line, field, problem)

    def field(self, fields: Mapping[str, Any], name: str) -> Any:
        if name not in fields:
            raise self.error(name, "missing")
        return fields[name]

    def number(self, field: str, value: Any) -> float:
        if value in (None, ""):
            raise self.error(field, "missing")
        try:
            number = nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = nan
        if not isfinite(number):
            raise self.error(field, f"{_short(value)} is not a number")
        return number

    def tokens(self, field: str, value: Any) -> int:
        number = self.number(field, value)
        if number != int(number) or number < 1:
            raise self.error(field, f"{value} is not a number of tokens, at least 1")
        if number > MOST_TOKENS:
            raise self.error(field, f"{value} tokens are more than {MOST_TOKENS:,}: no model takes that")
        return int(number)

    def seconds(self, field: str, value: Any) -> float:
        """Seconds since some moment, the same for the whole file."""
        if field == "TIMESTAMP":
            date = _DATE.fullmatch(str(value).strip())
            if date is None:
                raise self.error(field, f"{value!r} is not a date such as 2023-11-16 18:15:46.6805900")
            return (datetime.fromisoformat(date[1]) - _ORIGIN).total_seconds() + float(date[2] or 0)
        number = self.number(field, value)
        if number < 0:
            raise self.error(field, f"{value} is negative")
        if number > LATEST:
            raise self.error(field, f"{value} is beyond any recording")
        return number / 1000 if field == "t_ms" else number

    def text(self, field: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise self.error(field, f"{value!r} is not a name")
        return value

    def slo(self, ttft: str | None, tbt: str | None) -> SLO:
        targets: dict[str, float | None] = {"slo": None, "tbt": None}
        for field, value in (("slo", ttft), ("tbt", tbt)):
            if value:
                targets[field] = number = self.number(field, value)
                if number <= 0:
                    raise self.error(field, f"{value} is not a target in seconds, above 0")
        return SLO(ttft=targets["slo"], tbt=targets["tbt"])

    def hashes(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self.error("hash_ids", "not a list of whole numbers")
        return tuple(value)

    def chat(self, field: str, value: Any) -> int | str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.error(field, f"{_short(value)} is not the number or name of a chat")
        return value


def _short(value: Any) -> str:
    """As it stands, but never more than a line can show."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number so long"
    return text if len(text) <= 60 else text[:60] + "..."
