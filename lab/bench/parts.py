"""Measures the time that each function of a package takes itself, without the functions that it calls."""

from __future__ import annotations

import functools
import importlib
import statistics
import sys
import time
from pathlib import Path
from types import FunctionType
from typing import Any


class Parts:
    """Replaces the functions of a package by functions that measure their time. Must be called before the package is
    used."""

    def __init__(self) -> None:
        self._spent: dict[str, list[int]] = {}  # nanoseconds of each call
        self._inner: list[int] = []  # for each call in progress, the outermost first: the time of the calls inside it

    def clear(self) -> None:
        self._spent.clear()

    def rows(self, steps: int) -> list[tuple[str, float, float]]:
        """For each function: its name, its calls in a step, and the microseconds of a step, the longest first."""
        found = [
            (name, len(spent) / steps, statistics.median(spent) * len(spent) / steps / 1000)
            for name, spent in list(self._spent.items())
        ]
        return sorted(found, key=lambda row: -row[2])

    def cover(self, package: str, folder: Path) -> None:
        """Import all modules of the agent in the package, and measure the functions that are defined in them."""
        paths = [path for room in ("agent", "protocol") for path in sorted((folder / room).rglob("*.py"))]
        own = [path.relative_to(folder) for path in paths if path.stem not in ("__init__", "sitecustomize")]
        names = [".".join(path.with_suffix("").parts) for path in own]
        modules = [importlib.import_module(f"{package}.{name}") for name in names]
        new: dict[Any, Any] = {}
        places = [vars(module) for module in modules]
        places += [vars(kind) for module in modules for kind in list(vars(module).values()) if isinstance(kind, type)]
        for place in places:
            for name, value in place.items():
                own = isinstance(value, FunctionType) and value.__module__.startswith(package)
                if own and not name.startswith("__") and value not in new:
                    new[value] = self._measured(value, f"{value.__module__[len(package) + 1 :]}.{value.__qualname__}")
        for module in modules:
            for owner in (module, *(kind for kind in vars(module).values() if isinstance(kind, type))):
                for name, value in list(vars(owner).items()):
                    if isinstance(value, FunctionType) and value in new and owner is not sys.modules[__name__]:
                        setattr(owner, name, new[value])

    def _measured(self, function: Any, name: str) -> Any:
        spent, inner, clock = self._spent, self._inner, time.perf_counter_ns

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            begun = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - begun
                spent.setdefault(name, []).append(took - inner.pop())
                if inner:
                    inner[-1] += took

        return call
