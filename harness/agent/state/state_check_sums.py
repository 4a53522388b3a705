"""Check sums, by name, of the state that a job trains or carries (tensor_names.py), and digests of its random number
generators. They are made at two times: when a save begins, so that the checkpoint can be compared with them later; and
in the first step of a process and after each load, save or `load_state_dict`, so that a resumed run can be compared
with the run that it continues.

In such a step, the state is read when the forward of a wrapped model begins, with the model's inputs; without such a
forward, when the backward begins. Only the thread that trains reads it, because another thread may save an earlier
copy. In all other steps, this costs one look at an attribute for each forward and backward."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib import import_module
from typing import Any

from ...protocol.check_sums import plain_of_each
from ...protocol.wire import Kind, Phase
from ..agent import Agent
from ..training.loss import is_capturing
from .tensor_names import Named, TensorNames, kind_of, tensors_in
from .training_state import trained_by

HOOK = "kept"
_MOST, _INPUTS = 20_000, 64  # tensors of one quantity; inputs of the model
_MOST_PUT_BACK = 50  # states: some jobs put one into a module in every step
_SUMMED = ("parameters", "frozen", "buffers", "moments")
_LONG = (*_SUMMED, "unsaved", "trained", "modes")


class StateSums:
    """Emits the check sums by name when a save begins and in the first step of a process or after a load, save or
    load_state_dict."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._torch = agent, import_module("torch")
        self._names = TensorNames(self._torch)
        agent.trained_beside = self._names.beside
        self._told: dict[str, Any] = {}  # what this process has written last, by its key in the event
        self._last: tuple[int, Any] = (-1, None)  # the last event of a save
        self._first: dict[str, list[str]] | None = None  # the parameters of the first step
        self._begun: dict[str, Any] = {}  # what was read when the forward began
        self._tensors: dict[str, Named] = {}  # that were looked at last, until their sums are written
        careful = agent.careful(HOOK)
        self.save_begins, self._begins = careful(self._save_begins), careful(self._step_begins)
        self.handled()

    def patch(self, torch: Any) -> None:
        """Patches load_state_dict of modules and optimizers: to load a state into what is trained counts as a load."""
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            kind.load_state_dict = self._then_handled(kind.load_state_dict)

    def _then_handled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        agent, put_back = self._agent, self._agent.careful(HOOK)(self._put_back)

        @functools.wraps(original)
        def load_state_dict(target: Any, *args: Any, **kwargs: Any) -> Any:
            if agent.on and agent.changed is not None:
                agent.changed(False)
            result = original(target, *args, **kwargs)
            if agent.on and agent.put_back < _MOST_PUT_BACK:
                put_back(target)
            return result

        return load_state_dict

    def _put_back(self, target: Any) -> None:
        trained = {id(each) for each in trained_by(self._agent)}
        if any(each is target for each in self._agent.optimizers) or any(
            id(each) in trained for each in getattr(target, "parameters", tuple)()
        ):
            self._agent.put_back += 1
            self.handled()

    def handled(self) -> None:
        """Must be called when a save begins and when a load is over. The next step then records its state."""
        if HOOK in self._agent.live:
            self._begun, self._agent.state_begins = {}, self._begins

    def _save_begins(self) -> None:
        agent = self._agent
        if HOOK not in agent.live:
            return
        self.handled()
        if threading.get_ident() == agent.thread:
            found = self._look()
            if found.get("parameters") and self._last != (agent.steps_over, found):
                self._last = (agent.steps_over, found)
                self._emit(Kind.KEPT, {**found, "rng": _generators()})
            self._tensors = {}

    def _step_begins(self, phase: Phase, inputs: Any = ()) -> None:
        """Must be called when a forward of a wrapped model begins, with its inputs, and before a backward or an
        optimizer's step."""
        if threading.get_ident() != self._agent.thread or is_capturing(self._torch.cuda):
            return
        if phase is Phase.FORWARD:
            if not self._begun:
                given = dict(tensors_in("", inputs, self._torch.Tensor))
                summed = self._summed({"inputs": given if len(given) <= _INPUTS else {}})
                self._begun = {**self._at_start(), **summed, "rng": _generators(), "at": phase.value}
        elif not self._agent.sees_forwards:
            self._agent.state_begins, self._begun = None, {}
            at_start = self._at_start()
            self._emit(Kind.BEGUN, {**at_start, "rng": _generators(), "at": phase.value, "modes": self._names.modes()})
            self._tensors = {}
        elif begun := self._begun:  # otherwise, a thread began to save in the middle of this step
            self._agent.state_begins, self._begun = None, {}
            if not self._agent.optimizers:  # only now it is known which parameters the losses reach
                self._divide(begun)
            drawn = [name for name, state in _generators().items() if begun["rng"].get(name) != state]
            # Only now, because the first forward may have been that of an evaluation.
            self._emit(Kind.BEGUN, {**begun, "drawn": drawn, "modes": self._names.modes()})
            self._tensors = {}

    def _at_start(self) -> dict[str, Any]:
        """What `_look` finds when a step begins. If the parameters are those of the first step again, the steps since
        then only warmed up."""
        found, agent = self._look(), self._agent
        own = found.get("parameters") or found.get("frozen")
        if not agent.steps_over:
            self._first = own
        elif own and own == self._first:
            agent.triggers.returned_to_start()
        return found

    def _divide(self, begun: dict[str, Any]) -> None:
        """Divides the parameters in `begun` into trained and frozen ones. This changes names, since the module in which
        nothing is trained has its class in them."""
        pairs = [(each, begun[what].get(name)) for what in _SUMMED if what in begun
                 for name, each in self._tensors[what].items()]  # fmt: skip
        sums = {id(each): of for each, of in pairs if of is not None}
        found = self._names.look(self._agent.optimizers, self._agent.reached())
        for what in {*begun} & {*_SUMMED}:
            begun[what] = {name: sums[id(each)] for name, each in found[what].items() if id(each) in sums}
        begun["trained"] = sorted(found["trained"])
        if found["unsaved"]:
            begun["unsaved"] = sorted(found["unsaved"])

    def _look(self) -> dict[str, Any]:
        """The check sums by quantity and name. Quantities with too many tensors are left out."""
        found = self._tensors = self._names.look(self._agent.optimizers, self._agent.reached())
        wanted = {what: of for what, of in found.items() if len(of) <= _MOST}
        names = {what: sorted(of) for what in ("unsaved", "trained") if (of := wanted.pop(what, None))}
        return {**self._summed(wanted), **names}

    def _summed(self, wanted: Mapping[str, Named]) -> dict[str, dict[str, list[str]]]:
        sums = iter(plain_of_each(self._torch, [each for of in wanted.values() for each in of.values()]))
        return {
            what: {name: [kind_of(each), total] for name, each in of.items() if (total := next(sums))}
            for what, of in wanted.items()
        }

    def _emit(self, kind: Kind, data: dict[str, Any]) -> None:
        """Writes the event, without the long values that this process has written before."""
        again = [what for what in _LONG if what in data and self._told.get(what) == data[what]]
        same = [what for what in again if kind is Kind.BEGUN or what != "parameters"]
        self._told.update(data)
        written = {what: value for what, value in data.items() if what not in same}
        self._agent.saw(HOOK)
        self._agent.emit(kind, {**written, **({"same": same} if same else {})})


def _generators() -> dict[str, str]:
    """Digests (16 hexadecimal digits) of the states of the generators in use: `torch`, `cuda` (of the current device,
    if the process uses CUDA), `numpy` (the global one), `python` (of the module random). Nothing is drawn, and no
    device waits."""
    return {name: blake2b(read(), digest_size=8).hexdigest() for name, read in _readers().items()}


def _readers() -> dict[str, Callable[[], bytes]]:
    torch: Any = import_module("torch")
    found = {"torch": lambda: _bytes(torch.default_generator)}
    if torch.cuda.is_initialized():
        found["cuda"] = lambda: _bytes(torch.cuda.default_generators[torch.cuda.current_device()])
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = lambda: _numpy(numpy.get_state(legacy=True))
    if (random := sys.modules.get("random")) is not None:
        found["python"] = lambda: repr(random.getstate()).encode()
    return found


def _bytes(generator: Any) -> bytes:
    return bytes(generator.get_state().numpy())


def _numpy(state: Any) -> bytes:
    name, key, *rest = state
    return repr((name, rest)).encode() + bytes(key)
