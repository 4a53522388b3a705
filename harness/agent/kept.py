"""What the parameters were when a save began: a check sum of each, by name, with which those in the checkpoint can be
compared later.

A sum is that of the tensor's bits, as in check_sums.py. It is taken in the thread that trains: what another thread
saves is a copy of an earlier time. The names are those of the outermost module, which is found once.
"""

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
# What wrappers (DDP, torch.compile, FSDP, checkpointing of activations) add to a name.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MOST = 20_000  # parameters
_TRIES = 3  # searches for names that leave a parameter without one


class Kept:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._torch = agent, import_module("torch")
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}  # by the id of the parameter
        self._tries = 0
        self._last: tuple[int, Any] = (-1, None)
        self.save_begins = agent.careful(HOOK)(self._tell)

    def _tell(self) -> None:
        agent = self._agent
        if HOOK not in agent.live or threading.get_ident() != agent.thread:
            return
        found = [one for one in parameters(agent.optimizers) if one.device.type != "meta"]
        if not found or len(found) > _MOST:
            return
        if self._tries < _TRIES and any(self._name(one) is None for one in found):
            self._tries += 1
            names = _names_of({id(one) for one in found}, self._torch.nn.Module)
            self._names = {id(one): (weakref.ref(one), names[id(one)]) for one in found if id(one) in names}
        named = {name: one for one in found if (name := self._name(one)) is not None}
        sums = plain_of_each(self._torch, list(named.values()))
        told = {name: [kind_of(one), found] for (name, one), found in zip(named.items(), sums, strict=True)}
        if told and self._last != (agent.steps_over, told):
            self._last = (agent.steps_over, told)
            agent.saw(HOOK)
            agent.emit(Kind.KEPT, {"parameters": told})

    def _name(self, one: Any) -> str | None:
        ref, name = self._names.get(id(one), (None, None))
        return name if ref is not None and ref() is one else None


def _names_of(wanted: set[int], kind: type) -> dict[int, str]:
    """Less those that two of them have: of a generator and a critic, say."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    inner = {id(child) for one in modules for child in one._modules.values()}
    names: dict[int, str] = {}
    for root in (one for one in modules if id(one) not in inner):
        names.update({id(one): plain_name(name) for name, one in root.named_parameters() if id(one) in wanted})
    times = Counter(names.values())
    return {one: name for one, name in names.items() if times[name] == 1}


def plain_name(name: str) -> str:
    """Without what wrappers added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def kind_of(tensor: Any) -> str:
    """Its type and shape, the whole one of a DTensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"
