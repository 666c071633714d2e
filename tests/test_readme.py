"""The README's example of one's own order does what it says, and its table of systems is complete."""

import re
from pathlib import Path

from scheduling.presets import PRESETS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_own_order_runs(capsys):
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "engine.lab" in block]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    shown = re.search(r"print\(parked\.data\)\s+# (.*)", example)
    assert shown is not None
    assert capsys.readouterr().out.strip() == shown.group(1)


def test_every_system_is_in_the_table():
    names = [name for row in re.findall(r"^\| (`[a-z][^|]*`) \|", README, re.MULTILINE) for name in row.split(", ")]
    assert {f"`{name}`" for name in PRESETS} <= set(names)
