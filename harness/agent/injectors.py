"""Loads an injector from its file, in a Python that may not have torchaos installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Iterator, Mapping


def load(source: str, injector: str, params: Mapping[str, Any]) -> Any:
    """Makes an instance of the class `injector` of the file `source`. Raises the errors of the import and of the
    constructor."""
    name = f"_torchaos_injector_{abs(hash(source)):x}"
    with _our_names(os.path.dirname(source)):
        module = sys.modules.get(name)
        if module is None:
            spec = importlib.util.spec_from_file_location(name, source)
            if spec is None or spec.loader is None:
                raise ImportError(f"{source} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # dataclasses look their module up there
            spec.loader.exec_module(module)
        return getattr(module, injector)(**params)


@contextmanager
def _our_names(folder: str) -> Iterator[None]:
    """Adapts imports while an injector is imported: `torchaos.harness.agent` is this package, `torchaos.plugin` is
    found beside the harness, and `torchaos.injectors` finds its modules in `folder`. Afterwards, restores
    sys.modules."""

    def ours() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchaos"}

    before, own = ours(), __name__.rpartition(".")[0]
    agent = {name: module for name, module in sys.modules.items() if name == own or name.startswith(f"{own}.")}
    root = os.path.dirname(os.path.dirname(agent[own].__path__[0]))
    try:
        for name in before:
            del sys.modules[name]
        for name, path in (("torchaos", [root]), ("torchaos.harness", []), ("torchaos.injectors", [folder])):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = path
        for name, module in agent.items():
            sys.modules[f"torchaos.harness.agent{name[len(own) :]}"] = module
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
