"""Rules that no single module can keep alone: which way imports point, and what may stand around a gate."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each part of the project may import, beside itself.
BELOW = {
    "scheduling": set(),
    "kv": set(),
    "models": {"kv"},
    "engine": {"models", "kv", "scheduling"},
    "server": {"engine", "models", "kv", "scheduling"},
    "examples": {"engine", "models", "kv", "scheduling"},
}
# Scheduling is pure Python without I/O or a clock: the same object runs in tests, in simulation and on a GPU.
NOT_FOR_SCHEDULING = {"torch", "numpy", "asyncio", "threading", "time"}


def files(*parts: str) -> list[Path]:
    found: list[Path] = []
    for part in parts:
        found += [ROOT / "server.py"] if part == "server" else sorted((ROOT / part).rglob("*.py"))
    assert len(found) >= len(parts)
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """The top-level names of all modules imported anywhere in a file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0] if not node.level else "."


@pytest.mark.parametrize("part", BELOW)
def test_imports_point_one_way(part: str) -> None:
    forbidden = set(BELOW) - BELOW[part] - {part} | {"."}
    if part == "scheduling":
        forbidden |= NOT_FOR_SCHEDULING
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in files(part)
        if (names := forbidden.intersection(imports(ast.parse(path.read_text()))))
    }
    assert wrong == {}


def awaits_a_gate_inside_a_block(source: str) -> list[int]:
    """Lines of `with` and `try ... finally` that hold an await of something that mentions a gate.

    A forward pass may be suspended in such an await and go on, or be dropped, much later: a lock would be held all
    that time, and a mode of torch, which belongs to the thread, would leak into whatever the thread runs meanwhile.
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        holds = isinstance(node, ast.With | ast.AsyncWith) or (isinstance(node, ast.Try) and node.finalbody)
        if holds and any(isinstance(inner, ast.Await) and _mentions_a_gate(inner) for inner in _own_code(node)):
            lines.append(node.lineno)
    return lines


def _own_code(block: ast.AST) -> Iterator[ast.AST]:
    """All nodes in a block, but not inside functions that are only defined there."""
    for child in ast.iter_child_nodes(block):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own_code(child)


def _mentions_a_gate(node: ast.AST) -> bool:
    names = (getattr(inner, "id", getattr(inner, "attr", "")) for inner in ast.walk(node))
    return any("gate" in name for name in names)


@pytest.mark.parametrize("path", files("models", "engine"), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_held_across_a_gate(path: Path) -> None:
    assert awaits_a_gate_inside_a_block(path.read_text()) == []


def test_the_check_for_held_things_finds_them() -> None:
    held = """
async def forward(x, gate, lock, self):
    with lock:
        x = work(x)
        await gate.operator("a")
    async with lock:
        for layer in self.layers:
            x = await layer.mlp(x, gate)
    try:
        await self.gate
    finally:
        x.free()
"""
    fine = """
async def forward(x, gate, lock):
    with lock:
        x = work(x)
        async def later():
            await gate.operator("b")
    await gate.operator("a")
    async with lock:
        await something_else()
    try:
        await gate.operator("c")
    except ValueError:
        return None
"""
    assert awaits_a_gate_inside_a_block(held) == [3, 6, 9]
    assert awaits_a_gate_inside_a_block(fine) == []
