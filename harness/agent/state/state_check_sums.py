"""Check sums, by name, of the state that a job trains or carries (tensor_names.py), and digests of its random number
generators. They are made at two times: when a save begins, so that the checkpoint can be compared with them later; and
in the first step of a process and after each load, save or `load_state_dict`, so that a resumed run can be compared
with the run that it continues.

In such a step, the state is read when the forward of a wrapped model begins, with the model's inputs; without such a
forward, when the backward begins. Only the thread that trains reads it, because another thread may save an earlier
copy. In all other steps, this costs one look at an attribute for each forward and backward.

Also the training state in a few bytes (`StateHook`): check sums of the parameters and of the optimizers' moments before
the first step and after each step, and the norm of the gradient. A check sum shows that two runs differ, but not by how
much. A *sketch* does: it has the norm of all parameters, and SUMS sums over the parameters. In each sum, every
parameter has its own sign, + or -. If the parameters of two runs differ, each sum differs by about the norm of the
difference (Johnson and Lindenstrauss)."""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from typing import Any

from ...protocol.check_sums import SHARD, check_sum, is_whole, local, plain_of_each, stacked
from ...protocol.wire import Kind, Phase
from ..agent import Agent
from ..training.step_counter import Shown
from ..training.step_events import is_capturing
from .tensor_names import Named, TensorNames, kind_of, parameters, tensors_in

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
        self._last: tuple[int, Any] = (-1, None)  # the last event at a save
        self._first: dict[str, list[str]] | None = None  # the parameters of the first step
        self._begun: dict[str, Any] = {}  # what was read when the forward began
        self._tensors: dict[str, Named] = {}  # the tensors that were read last, until their sums are written
        self._amid: int | None = None  # completed steps: a thread began to save in the middle of the step after them
        careful = agent.careful(HOOK)
        self.save_begins, self._begins = careful(self._save_begins), careful(self._step_begins)
        self.handled()

    def patch(self, torch: Any) -> None:
        """Patches load_state_dict of modules and optimizers: such a load counts as a load if it is of what the job
        trains."""
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
            self._begun, self._agent.state_begins, self._amid = {}, self._begins, None

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
        elif agent.phases.had(Phase.BACKWARD):  # a thread began to save: further forwards of this step begin no step
            self._amid = agent.steps_over

    def _step_begins(self, phase: Phase, inputs: Any = ()) -> None:
        """Must be called when a forward of a wrapped model begins, with its `inputs`, and before a backward or an
        optimizer's step."""
        if threading.get_ident() != self._agent.thread or is_capturing(self._torch.cuda):
            return
        if self._amid == self._agent.steps_over:
            return
        if phase is Phase.FORWARD:
            if not self._begun:
                # Not what another module has computed with gradients: it follows from that module's state.
                every = tensors_in("", inputs, self._torch.Tensor)
                given = {name: each for name, each in every if each.grad_fn is None}
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
        """The check sums at the beginning of a step. If the parameters equal those before the first step again, all
        steps so far were only a warm-up."""
        found, agent = self._look(), self._agent
        own = found.get("parameters") or found.get("frozen")
        if not agent.steps_over:
            self._first = own
        elif own and own == self._first:
            agent.faults.returned_to_start()
        return found

    def _divide(self, begun: dict[str, Any]) -> None:
        """Divides the parameters in `begun` into trained and frozen ones. This can change names: a module in which
        nothing is trained has its class in its names."""
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


_MOST_MOMENTS = 16  # per parameter
SPIKE, MEMORY = 10.0, 20  # a note is written if the norm is more than SPIKE times the mean of the last MEMORY steps
SUMS = 8  # sums in a sketch


class StateHook:
    """Records the norm of the gradient after each backward, and the training state after each step."""

    def __init__(self, agent: Agent) -> None:
        careful = agent.careful("state")
        self._agent, self._torch = agent, import_module("torch")
        self._in_order = TensorNames(self._torch).in_order
        self._norms: deque[float] = deque(maxlen=MEMORY)
        # The numbers of loads, saves and states put back before the last backward. After these, the job may have other
        # parameters.
        self._handled: tuple[int, int, int] | None = None
        # A step whose state is not recorded yet, the number of loads until its end, and the values that were in place
        # then.
        self._late: tuple[int, int, Shown | None] | None = None
        # By id of a parameter: its gradient when the last step was over, with the count of its changes.
        self._left: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.backward_over, self.step_over = careful(self._note_norm), careful(self._note_parameters)
        self.report_late = careful(self._report_late)

    def _note_norm(self) -> None:
        torch = self._torch
        if is_capturing(torch.cuda):
            return
        trained = trained_by(self._agent)
        grads = [local(each.grad) for each in trained if each.grad is not None and not self._is_left(each)]
        handled = (self._agent.loads, self._agent.saves, self._agent.put_back)
        if self._handled != handled:
            self._handled, self._agent.tally.now.before = handled, self._shown()
        with torch.no_grad():
            if grads:  # now, because the step may never end
                norm = float(torch.linalg.vector_norm(_norms(torch, grads)))
                if not math.isfinite(norm) and all(grad.device.type != "mps" for grad in grads):
                    # The squares of finite gradients may overflow in float32.
                    norm = float(torch.linalg.vector_norm(_norms(torch, grads, torch.float64)))
                self._agent.tally.now.norm = norm
                self._report_spike(norm)

    def _is_left(self, parameter: Any) -> bool:
        """Whether the gradient is still that of an earlier step. If two networks are trained in turns, the one that
        waits keeps its gradients, which a restart loses."""
        made, version = self._left.get(id(parameter), (_nothing, 0))
        grad = made()
        return grad is not None and grad is parameter.grad and bool(grad._version == version)

    def _report_spike(self, norm: float) -> None:
        usual = sum(self._norms) / len(self._norms) if len(self._norms) >= 3 else math.inf
        if math.isfinite(norm) and norm <= SPIKE * usual:
            self._norms.append(norm)
        else:
            self._agent.emit(Kind.NOTE, {"text": f"the norm of the gradient is {norm:.6g}", "norm": norm})

    def _note_parameters(self, trains: bool) -> None:
        """Must be called when a step is over. `trains` False: the job may have put other values in place of the
        parameters, so the state after the step is read when the job trains on, and is reported by a later event."""
        self._left = {
            id(each): (weakref.ref(each.grad), each.grad._version)
            for each in trained_by(self._agent) if each.grad is not None
        } if len(self._agent.made) > 1 else {}  # fmt: skip
        if not trains:
            self._late = self._agent.steps_over + 1, self._agent.loads, self._shown()
        elif (shown := self._shown()) is not None:
            self._agent.saw("state")
            self._agent.tally.now.after = shown

    def _report_late(self) -> None:
        """Must be called when the job trains on, begins to load, or ends. Reports the state after the last step now or,
        if those parameters no longer exist, the values that were in place at the end of the step."""
        if self._late is None:
            return
        (step, loads, then), self._late = self._late, None
        if loads == self._agent.loads and (shown := self._shown() or then) is not None:
            self._agent.saw("state")
            self._agent.emit(Kind.LOSS, {"losses": [], **vars(shown)}, step)

    def _shown(self) -> Shown | None:
        torch, optimizers = self._torch, self._agent.optimizers
        trained = self._in_order(trained_by(self._agent))
        if not trained or is_capturing(torch.cuda):
            return None
        moment_sum = check_sum(torch, list(moments(optimizers, trained)))
        if is_whole(moment_sum) and any(map(is_shared_out, optimizers)):
            moment_sum = SHARD + moment_sum
        return Shown(check_sum(torch, list(enumerate(trained))), moment_sum, self._sketch(trained))

    def _sketch(self, whole: Sequence[Any]) -> list[float]:
        torch, parts = self._torch, [local(part).detach() for part in whole]
        real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        exact = torch.float32 if any(part.device.type == "mps" for part in real) else torch.float64
        with torch.no_grad():
            sums = stacked(torch, [part.sum(dtype=exact) for part in real]).tolist()
            norms = _norms(torch, real).tolist()
        return [math.hypot(*norms), *(math.fsum(_signed(sums, number)) for number in range(1, SUMS + 1))]


def _nothing() -> None:
    return None


def _norms(torch: Any, tensors: Sequence[Any], dtype: Any = None) -> Any:
    """The norm of each tensor, in `dtype` (None: float32). In float64 if some tensor has that type, because torch
    refuses to narrow it."""
    plain = [tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach() for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain]
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in real) else dtype or torch.float32
    return stacked(torch, [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in real])


def _signed(sums: list[float], number: int) -> list[float]:
    """The sums with the signs of Walsh function `number`. Any two of these functions differ in half of their signs."""
    return [-total if (place & number).bit_count() % 2 else total for place, total in enumerate(sums)]


def trained_by(agent: Agent) -> list[Any]:
    """The parameters that the job trains: those of torch's optimizers, and those of optimizers of plain classes beside
    them. In a job without an optimizer of torch's: the parameters that its losses depend on."""
    own = parameters(agent.optimizers)
    return own + agent.trained_beside() if own else agent.reached()


def moments(optimizers: Sequence[Any], trained: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """The tensors that these optimizers keep for each of the `trained` parameters, such as Adam's two averages, each
    with a number that identifies it."""
    for place, parameter in enumerate(trained):
        # ZeroRedundancyOptimizer has None for parameters whose state another rank keeps.
        states = (state for optimizer in optimizers if (state := optimizer.state.get(parameter)) is not None)
        kept = {name: value for state in states for name, value in state.items() if getattr(value, "ndim", 0)}
        yield from ((_MOST_MOMENTS * place + number, kept[name]) for number, name in enumerate(sorted(kept)))


def is_shared_out(optimizer: Any) -> bool:
    """Whether each rank keeps the moments of different parameters, as with ZeroRedundancyOptimizer (ZeRO stage 1). Such
    an optimizer contains another optimizer, which trains only some of the parameters."""
    inner = getattr(optimizer, "optim", None)
    if not hasattr(inner, "param_groups"):
        return False
    own, all_ = ({id(each) for each in parameters([trainer])} for trainer in (inner, optimizer))
    return own < all_
