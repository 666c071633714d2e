"""Recorded requests, read from the formats they are published in. The format is told by the fields, not by the name:

    JSON lines with `chat_id`      Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon): seconds, 16-token blocks
    JSON lines without             Mooncake (kvcache-ai/Mooncake, FAST25-release): milliseconds, 512-token blocks
    CSV with TIMESTAMP             Azure (AzurePublicDataset): TIMESTAMP,ContextTokens,GeneratedTokens
    CSV with a time column         t_s, t_s_est, t_ms or time; and prompt_len,output_len or their other names
    CSV without                    a plain length file (Sarathi-Serve's, Vidur's): no arrivals

A CSV may also say `type`, and each request's own targets: `slo` (TTFT) and `tbt`, in seconds. Everything that is wrong
is a TraceError naming the file, the line and the field.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from examples.trace_fields import Place, TraceError
from scheduling.request import SLO

# Column names by what they mean, the first one found is read.
TIMES: Final = ("TIMESTAMP", "t_s", "t_s_est", "t_ms", "time", "arrived_at")
PROMPTS: Final = ("prompt_len", "ContextTokens", "prompt", "num_prefill_tokens")
OUTPUTS: Final = ("output_len", "GeneratedTokens", "output", "num_decode_tokens")

# Equal stamps are no mistake here: t_ms (Mooncake) ticks every three seconds, t_s_est is an estimate.
COARSE: Final = ("t_ms", "t_s_est")

QWEN_BLOCK, MOONCAKE_BLOCK = 16, 512  # tokens


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request. `time` in seconds since the first; `blocks`: hashes of its prompt, block by block."""

    prompt_tokens: int
    output_tokens: int
    time: float | None = None
    label: str | None = None  # its type; None where the format has none
    slo: SLO | None = None  # its own targets; None: those of its type
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival: all of them with a time, or none. `block_tokens`: in each of a row's blocks."""

    name: str
    rows: tuple[Row, ...]
    block_tokens: int = 0

    @property
    def timed(self) -> bool:
        return self.rows[0].time is not None

    @property
    def seconds(self) -> float:
        """First arrival to last; 0 for rows without times."""
        return self.rows[-1].time or 0.0

    @property
    def rate(self) -> float | None:
        """Arrivals per second as recorded: gaps over seconds. None where no time passes."""
        return (len(self.rows) - 1) / self.seconds if self.seconds else None


def read_trace(
    path: Path | str,
    *,
    types: Mapping[str, SLO] | None = None,
    allow_equal_times: bool = False,
    keep_history: bool = False,
) -> Trace:
    """Read a file of any of the formats. `types`: the types that are known; an unknown one is an error.

    Times must grow from line to line; `allow_equal_times` takes equal ones as a burst, which formats with coarse stamps
    may always have. In a Qwen-Bailian file a text that continues a chat counts only its new tokens, as in FlowPrefill
    (the history is taken to be cached); `keep_history` counts them all. OSError where there is no such file.
    """
    path = Path(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if not first:
                raise TraceError(path, 1, "", "the file is empty")
            read = _read_jsonl(path, file, keep_history) if first.lstrip().startswith("{") else _read_csv(path, file)
        except UnicodeDecodeError as error:
            raise TraceError(path, _undecodable(path), "", f"not UTF-8 text: {error.reason}") from None
    if not read.rows:
        raise TraceError(path, 1, "", "a header and no rows")
    _check_types(path, read, types)
    _check_times(path, read, allow_equal_times or read.coarse)
    start = read.rows[0][1].time
    rows = (row if row.time is None or start is None else replace(row, time=row.time - start) for _, row in read.rows)
    return Trace(path.name, tuple(rows), read.block_tokens)


def _undecodable(path: Path) -> int:
    """The first line that is not UTF-8: a decoder does not know how many lines it has read."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


@dataclass(frozen=True, slots=True)
class _Read:
    """What a reader has found, before it is checked line against line."""

    rows: list[tuple[int, Row]]  # (line, row)
    time_field: str
    coarse: bool  # stamps too coarse to tell arrivals apart
    block_tokens: int = 0


def _check_types(path: Path, read: _Read, types: Mapping[str, SLO] | None) -> None:
    for line, row in read.rows:
        if types is not None and row.label is not None and row.label not in types:
            raise TraceError(path, line, "type", f"{row.label!r} is none of {', '.join(types)}")


def _check_times(path: Path, read: _Read, equal: bool) -> None:
    for (_, before), (line, after) in pairwise(read.rows):
        if before.time is None or after.time is None:
            continue
        if after.time < before.time:
            problem = f"{before.time - after.time:g} s before the line above: not sorted"
            raise TraceError(path, line, read.time_field, problem)
        if after.time == before.time and not equal:
            problem = "the same as in the line above (--allow-equal-times takes both as a burst)"
            raise TraceError(path, line, read.time_field, problem)


# CSV


def _read_csv(path: Path, file: Iterator[str]) -> _Read:
    reader = csv.DictReader(file, skipinitialspace=True)
    columns = [name for name in reader.fieldnames or () if name]
    for name in columns:
        if columns.count(name) > 1:
            raise TraceError(path, 1, name, "two columns of this name")
    time, prompt, output = (
        next((name for name in names if name in columns), "") for names in (TIMES, PROMPTS, OUTPUTS)
    )
    for found, meaning, names in ((prompt, "prompt", PROMPTS), (output, "output", OUTPUTS)):
        if not found:
            problem = f"no column for {meaning} tokens: expected one of {', '.join(names)}, among {_few(columns)}"
            raise TraceError(path, 1, names[0], problem)

    def parse(fields: dict[str | None, Any], at: Place) -> Row:
        if None in fields:  # where csv puts what is beyond the header: a comma in a number, for one
            raise at.error("", f"{len(fields[None])} more than the header's {len(reader.fieldnames or ())} fields")
        return Row(
            prompt_tokens=at.tokens(prompt, fields[prompt]),
            output_tokens=at.tokens(output, fields[output]),
            time=at.seconds(time, fields[time]) if time else None,
            label=at.text("type", fields["type"]) if "type" in columns else None,
            slo=at.slo(fields.get("slo"), fields.get("tbt")) if "slo" in columns or "tbt" in columns else None,
        )

    rows = []
    try:
        for fields in reader:
            rows.append((reader.line_num, parse(fields, Place(path, reader.line_num))))
    except csv.Error as error:
        raise TraceError(path, reader.line_num + 1, "", f"not CSV: {error}") from None
    return _Read(rows, time, time in COARSE)


def _few(names: Sequence[str]) -> str:
    """The first of them, each cut to what a line can show."""
    return ", ".join(repr(name[:40]) for name in names[:8]) + (", ..." if len(names) > 8 else "")


# JSON lines


def _read_jsonl(path: Path, file: Iterator[str], keep_history: bool) -> _Read:
    rows: list[tuple[int, Row]] = []
    qwen = False
    blocks_of: dict[Any, tuple[int, ...]] = {}  # by chat_id
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        at = Place(path, line)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, line, "", f"not a JSON object: {error}") from None
        if not isinstance(fields, dict):
            raise TraceError(path, line, "", f"not a JSON object: {text.strip()[:40]}")
        qwen = qwen or (not rows and "chat_id" in fields)
        stamp = at.seconds("timestamp", at.field(fields, "timestamp"))
        row = Row(
            prompt_tokens=at.tokens("input_length", at.field(fields, "input_length")),
            output_tokens=at.tokens("output_length", at.field(fields, "output_length")),
            time=stamp if qwen else stamp / 1000,
            label=at.text("type", at.field(fields, "type")) if qwen else None,
            blocks=at.hashes(fields.get("hash_ids", [])),
        )
        if qwen:
            blocks_of[at.chat("chat_id", at.field(fields, "chat_id"))] = row.blocks
            history = blocks_of.get(at.chat("parent_chat_id", fields.get("parent_chat_id", -1)), ())
            if row.label == "text" and history and not keep_history:
                row = _without_history(row, len(history))
        rows.append((line, row))
    hashed = any(row.blocks for _, row in rows)
    block_tokens = (QWEN_BLOCK if qwen else MOONCAKE_BLOCK) if hashed else 0
    return _Read(rows, "timestamp", coarse=not qwen, block_tokens=block_tokens)


def _without_history(row: Row, blocks: int) -> Row:
    """The row with only the blocks that its parent did not have; at least one block, however the hashes count."""
    new = max(1, len(row.blocks) - blocks)
    return replace(row, prompt_tokens=new * QWEN_BLOCK, blocks=row.blocks[-new:])
