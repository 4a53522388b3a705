"""Check sums of all parameters when a save begins, by name, so that the checkpoint can be compared with them later.

A check sum covers the tensor's bits, as in check_sums.py. It is made only in the thread that trains, because another
thread may save an earlier copy. The names are those of the outermost module, and are looked up once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from importlib import import_module
from typing import Any

from .agent import Agent
from .check_sums import plain_of_each
from .state import parameters
from .wire import Kind

HOOK = "kept"
# The parts that wrappers (DDP, torch.compile, FSDP, checkpointing of activations) add to a parameter's name.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MOST = 20_000  # parameters
_TRIES = 3  # searches for the names, if some parameter has no name


class ParameterSums:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._torch = agent, import_module("torch")
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}  # by the id of the parameter
        self._tries = 0
        self._last: tuple[int, Any] = (-1, None)
        self.save_begins = agent.careful(HOOK)(self._emit_sums)

    def _emit_sums(self) -> None:
        agent = self._agent
        if HOOK not in agent.live or threading.get_ident() != agent.thread:
            return
        found = [parameter for parameter in parameters(agent.optimizers) if parameter.device.type != "meta"]
        if not found or len(found) > _MOST:
            return
        if self._tries < _TRIES and any(self._name(parameter) is None for parameter in found):
            self._tries += 1
            names = _names_of({id(parameter) for parameter in found}, self._torch.nn.Module)
            self._names = {id(each): (weakref.ref(each), names[id(each)]) for each in found if id(each) in names}
        named = {name: parameter for parameter in found if (name := self._name(parameter)) is not None}
        sums = plain_of_each(self._torch, list(named.values()))
        entries = {name: [kind_of(each), total] for (name, each), total in zip(named.items(), sums, strict=True)}
        if entries and self._last != (agent.steps_over, entries):
            self._last = (agent.steps_over, entries)
            agent.saw(HOOK)
            agent.emit(Kind.KEPT, {"parameters": entries})

    def _name(self, parameter: Any) -> str | None:
        ref, name = self._names.get(id(parameter), (None, None))
        return name if ref is not None and ref() is parameter else None


def _names_of(wanted: set[int], kind: type) -> dict[int, str]:
    """The name of each wanted parameter, by its id. Names that two parameters share are left out."""
    modules = [module for module in gc.get_objects() if issubclass(type(module), kind)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    names: dict[int, str] = {}
    for root in (module for module in modules if id(module) not in inner):
        names.update({id(each): plain_name(name) for name, each in root.named_parameters() if id(each) in wanted})
    times = Counter(names.values())
    return {key: name for key, name in names.items() if times[name] == 1}


def plain_name(name: str) -> str:
    """The name without the parts that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def kind_of(tensor: Any) -> str:
    """The tensor's type and shape as text, such as `float32 4x8`. A DTensor has the shape of the whole tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"
