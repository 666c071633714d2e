"""Find an order by its name, or by the import path of one's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scheduling.order import DEDF, EDF, FCFS, SEDF, SJF, Order

ORDERS: dict[str, Callable[[], Order]] = {"fcfs": FCFS, "sjf": SJF, "edf": EDF, "d-edf": DEDF, "s-edf": SEDF}


def find_order(text: str) -> Order:
    """The order called `text`, or the one at an import path such as `mypackage.mymodule:MyOrder`: an order, or a class
    that makes one without arguments. Modules are looked for in the current directory as well.

    ValueError, in one line, for what cannot be found or imported, or is no order.
    """
    if text in ORDERS:
        return ORDERS[text]()
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ValueError(
            f"no order called {text!r}; there are {', '.join(ORDERS)}, and your own by import path, like "
            "mypackage.mymodule:MyOrder"
        )
    try:
        with _current_directory_on_path():
            found = getattr(importlib.import_module(module_name), name)
        order: Order = found() if isinstance(found, type) else found
    except Exception as error:  # whatever the user's module does
        raise ValueError(f"order {text}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    missing = [method for method in ("rank", "refuses") if not callable(getattr(order, method, None))]
    if missing:
        raise ValueError(
            f"order {text} has no method {' and no method '.join(missing)}; subclass scheduling.order.Order and define "
            "rank(self, candidate, now)"
        )
    return order


@contextmanager
def _current_directory_on_path() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]  # the one put there, not the user's own
