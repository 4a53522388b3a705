"""Calls a function when a module has been imported, without importing the module and without changing its loader."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence

Then = Callable[[ModuleType], None]


class PostImport:
    """Calls functions after imports. It is an import finder that finds no module itself: it asks the other finders, and
    wraps the function that executes the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}
        self._ended: set[str] = set()  # names of modules whose import has ended

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def when(self, name: str, then: Then) -> None:
        """Calls `then` with the module: now if it is imported already, otherwise at the end of its import."""
        module = sys.modules.get(name)
        under_way = getattr(getattr(module, "__spec__", None), "_initializing", False) and name not in self._ended
        if module is not None and not under_way:
            then(module)
        else:
            self._waiting.setdefault(name, []).append(then)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                self._follow(name, spec)
                return spec  # type: ignore[no-any-return]
        return None

    def _follow(self, name: str, spec: ModuleSpec) -> None:
        # The loader object stays the same, because tools check its type. Only `exec_module` of this instance is
        # replaced, and restored before the module runs.
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            original(module)
            self._ended.add(name)
            for then in self._waiting.pop(name, []):
                then(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a class, or a loader with slots: builtins and frozen modules, never torch's
            return
