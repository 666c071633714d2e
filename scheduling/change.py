"""Change some answers of a system and keep the others, by words: what ablations and command lines do.

    change(preset("flowprefill"), "preempt=layer")
    change(preset("distserve-cp2k"), "order=s-edf", "budget=4096", "chunk=4096")
    change(preset("distserve"), "order=mypackage.mymodule:MyOrder")

A key is an answer (order, batch, plan, preempt, placement), `chunk`, or a field of one of the system's answers, such as
`budget`; two of one name are told apart as `order.patience` and `placement.patience`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from scheduling.batch import Alone, FillBudget, FillChunks, FillSequences, SLOAware
from scheduling.layered import Layered
from scheduling.orders import find_order
from scheduling.placement import Disaggregated, Exclusive, Interleave, Piggyback, RequestLevel
from scheduling.plan import Chunked, Plan, Whole
from scheduling.preempt import Preempt
from scheduling.presets import System

ANSWERS: Mapping[str, Mapping[str, object]] = {
    "batch": {
        "alone": Alone(),
        "fill-budget": FillBudget(),
        "fill-chunks": FillChunks(),
        "fill-sequences": FillSequences(),
        "slo-aware": SLOAware(),
    },
    "plan": {"whole": Whole(), "layered": Layered()},  # and chunk=TOKENS
    "preempt": {level.name.lower().replace("_", "-"): level for level in Preempt},
    "placement": {
        "disaggregated": Disaggregated(),
        "piggyback": Piggyback(),
        "exclusive": Exclusive(),
        "interleave": Interleave(),
        "request-level": RequestLevel(),
    },
}


def change(system: System, *settings: str) -> System:
    """`system` with each of `settings`, in the form KEY=VALUE, in place of the answer, or part of one, that it has.

    They are applied in turn, and judged together at the end. ValueError, naming what is possible, for a key or a value
    that is none, for one that has no meaning for this system, and for answers that contradict each other.
    """
    answers: dict[str, Any] = {field.name: getattr(system, field.name) for field in fields(system)}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not of the form KEY=VALUE")
        if key == "order":
            answers["order"] = find_order(value)
        elif key == "chunk":
            answers["plan"] = _rechunked(answers["plan"], value)
        elif key in ANSWERS:
            answers[key] = _one_of(setting, value.replace("_", "-"), ANSWERS[key])  # half_layer is half-layer
        else:
            name, part = _part(answers, key, setting)
            hint = get_type_hints(type(answers[name]))[part]
            answers[name] = replace(answers[name], **{part: _parse(setting, value, hint)})
    return System(**answers)


def _rechunked(plan: Plan, value: str) -> Plan:
    """The plan with chunks of another size along tokens, or with none."""
    size: int | None = _parse(f"chunk={value}", value, int | None)
    if isinstance(plan, Layered):
        return replace(plan, chunk=size)
    if size is None:
        return Whole()
    return replace(plan, size=size) if isinstance(plan, Chunked) else Chunked(size)


def _part(answers: Mapping[str, Any], key: str, setting: str) -> tuple[str, str]:
    """(answer, field) that `key` names, as `field` or, where two answers have one of that name, as `answer.field`."""
    parts = [
        (name, field.name)
        for name, answer in answers.items()
        if is_dataclass(answer)
        for field in fields(answer)
        if field.name not in ("size", "chunk")  # of plans: what `chunk` changes
    ]
    found = [(name, field) for name, field in parts if key in (field, f"{name}.{field}")]
    if not found:
        raise ValueError(
            f"{setting}: this system has no {key!r}; it has order, chunk, {', '.join(ANSWERS)}, and as parts of them "
            f"{', '.join(field for _, field in parts) or 'nothing'}"
        )
    if len(found) > 1:
        raise ValueError(f"{setting}: say which, {' or '.join('.'.join(part) for part in found)}")
    return found[0]


def _parse(setting: str, value: str, hint: Any) -> Any:
    """`value` as what a field of this type holds: a number, a truth, one of some words, or none."""
    if NoneType in get_args(hint):
        if value == "none":
            return None
        (hint,) = set(get_args(hint)) - {NoneType}
    if get_origin(hint) is Literal:
        return _one_of(setting, value, {choice: choice for choice in get_args(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of(setting, value, {member.value: member for member in hint})
    if hint is bool:
        return _one_of(setting, value, {"true": True, "false": False})
    try:
        return hint(value)
    except ValueError:
        raise ValueError(f"{setting}: not a {'whole number' if hint is int else 'number'}") from None


def _one_of(setting: str, value: str, choices: Mapping[str, Any]) -> Any:
    if value not in choices:
        raise ValueError(f"{setting}: must be one of {', '.join(choices)}")
    return choices[value]
