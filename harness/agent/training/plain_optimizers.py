"""Jobs without an optimizer of torch's: the optimizer is of a plain class, such as the Muon of many scripts, or the
update is written out in the loop.

`PlainOptimizers` finds the learning rates of plain classes: of objects with a method `step` that keep a list of
parameters, and a rate in `param_groups` or in an attribute. They are searched among all objects when a backward begins
and no optimizer has stepped. Their `step` is wrapped in their class, because the rate must be read in the step: the
loop may set another one before it trains on.

`UpdateDetector` finds out that the parameters have changed after a backward. No call shows this, so the parameters are
compared when the job fetches a batch, begins a forward or a backward, saves or loads. Torch counts the changes of a
tensor (`_version`), but not those through `.data` or NumPy. So until these counts have shown a change, check sums of
the smallest parameters are compared as well."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ...protocol.check_sums import local, plain_of_each
from ..agent import Agent
from ..state.live_objects import live_objects, may_optimize
from ..state.tensor_names import held_in_modules
from .learning_rates import as_number

_LOOKS = 4  # at most
_NAMES = ("lr", "learning_rate")
_MOST = 64  # rates


class PlainOptimizers:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._torch, self._looks = agent, import_module("torch"), 0
        self._kinds: set[type] = set()  # whose `step` is wrapped
        # By id: each object that has stepped, and whether it is such an optimizer.
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._steps = agent.careful("lr")(self._step_begins)

    def look(self) -> None:
        """Finds such optimizers, and wraps their `step`. Must be called when a backward begins and no optimizer has
        stepped."""
        if self._looks == _LOOKS or self._kinds:
            return
        self._looks += 1
        optimizer, may = self._torch.optim.Optimizer, dict[type, bool]()
        for each in live_objects():
            kind = type(each)
            if kind not in may:
                may[kind] = may_optimize(kind) and not issubclass(kind, optimizer)
            if may[kind] and kind not in self._kinds and self._trains(each):
                self._cover(kind)

    def _cover(self, kind: type) -> None:
        owner: Any = next(base for base in kind.__mro__ if "step" in vars(base))
        original, agent, steps = vars(owner)["step"], self._agent, self._steps
        self._kinds.add(kind)
        if not inspect.isfunction(original):
            return

        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if agent.on and "lr" in agent.live:
                steps(optimizer)
            return original(optimizer, *args, **kwargs)

        owner.step = step

    def _step_begins(self, optimizer: Any) -> None:
        known, trains = self._known.get(id(optimizer), (None, False))
        if known is None or known() is not optimizer:
            trains = self._trains(optimizer)
            self._known[id(optimizer)] = weakref.ref(optimizer), trains
        rates = self._agent.tally.now.lr
        if trains and len(rates) < _MOST:
            self._agent.unseen.discard("lr")
            rates += map(as_number, list(_rates(optimizer))[:_MOST])

    def _trains(self, each: Any) -> bool:
        """Whether this is an optimizer with a rate, of parameters that no optimizer of torch's has. An object that
        contains one of torch's is a wrapper."""
        values = list(vars(each).values())
        if any(isinstance(value, self._torch.optim.Optimizer) for value in values) or not [*_rates(each)]:
            return False
        of_torch = {id(own) for one in self._agent.optimizers for group in one.param_groups for own in group["params"]}
        held = [*(one for value in values for one in _in_list(value)), *held_in_modules(values, self._torch)]
        own = [one for one in held if isinstance(one, self._torch.nn.Parameter)]
        return bool(own) and not any(id(one) in of_torch for one in own)


def _rates(optimizer: Any) -> Iterator[Any]:
    """The rate of each parameter group; without groups, the attribute."""
    groups = vars(optimizer).get("param_groups")
    found = [group["lr"] for group in groups if isinstance(group, Mapping) and "lr" in group] if isinstance(
        groups, (list, tuple)) else []  # fmt: skip
    for value in found or [vars(optimizer).get(name) for name in _NAMES]:
        if (isinstance(value, (int, float)) and not isinstance(value, bool)) or getattr(value, "numel", int)() == 1:
            yield value


def _in_list(value: Any) -> Iterator[Any]:
    """The elements of a list, or of the groups in it, or the values of a mapping."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        if isinstance(each, dict) and isinstance(each.get("params"), (list, tuple)):
            yield from each["params"]
        else:
            yield each


_MOST_NODES = 20_000  # of the graph of a loss
_FEW, _MOST_ELEMENTS = 8, 1 << 16  # parameters whose values are compared, and values of each
_SEARCHES = 2  # of all modules, for parameters with gradients
_WIDENED = 4  # such searches for modules that losses reach


class UpdateDetector:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._torch = agent, import_module("torch")
        self._leaves: dict[int, weakref.ref[Any]] = {}  # the tensors that losses reach, by id
        self._marks: dict[int, int] = {}  # the counts of changes at the first backward since the last update
        self._values: list[str] = []  # check sums at that time
        self._counted = False  # a count has shown a change
        self._searches = self._widened = 0
        self._handled = (0, 0)

    def parameters(self) -> list[Any]:
        """The tensors that losses depend on, with all parameters of their modules, without those whose memory FSDP2 has
        freed."""
        return [each for each in self._alive() if self._has_memory(local(each))]

    def _has_memory(self, tensor: Any) -> bool:
        return tensor.layout is not self._torch.strided or tensor.untyped_storage().size() > 0

    def _alive(self) -> list[Any]:
        return [alive for ref in self._leaves.values() if (alive := ref()) is not None]

    def backward_begins(self, roots: Any) -> None:
        """Must be called when a backward begins. Notes the tensors on which the loss depends."""
        self._agent.backwards += 1
        if self._agent.made:
            return
        new = [leaf for leaf in _leaves(roots) if self._leaves.get(id(leaf), _nothing)() is not leaf]
        self._leaves.update((id(leaf), weakref.ref(leaf)) for leaf in new)
        if new and self._widened < _WIDENED:
            self._widened += 1
            self._widen()
        if (self._agent.loads, self._agent.put_back) != self._handled:
            self._marks = {}  # of a backward before a load: later changes are an update
        self._mark()

    def _widen(self) -> None:
        """Adds all trainable parameters of each outermost module on which a loss depends, in the module's order. A
        single step may leave some of them out, such as layers dropped at random, or MoE experts that got no token."""
        modules, places = self._modules(), {key: place for place, key in enumerate(self._leaves)}
        inner = {id(child) for each in modules for child in each._modules.values()}
        reached = list[tuple[int, list[Any]]]()
        for module in (each for each in modules if id(each) not in inner):
            own = [each for each in module.parameters() if each.requires_grad]
            of_losses = [id(each) for each in own if self._leaves.get(id(each), _nothing)() is each]
            if of_losses:
                reached.append((min(places[key] for key in of_losses), own))
        ordered = {
            id(each): weakref.ref(each) for _first, own in sorted(reached, key=lambda one: one[0]) for each in own
        }
        self._leaves = {**ordered, **{key: ref for key, ref in self._leaves.items() if key not in ordered}}

    def _modules(self) -> list[Any]:
        module = self._torch.nn.Module
        return [one for one in live_objects() if issubclass(type(one), module) and "_modules" in vars(one)]

    def backward_ends(self) -> None:
        """Looks for the parameters in all modules if the gradients are not in the tensors that the loss depends on:
        FSDP2 uses such tensors during the forward only."""
        if self._searches < _SEARCHES and not any(each.grad is not None for each in self.parameters()):
            self._searches += 1
            found = dict[int, Any]()
            for each in self._modules():
                found.update((id(own), own) for own in each.parameters() if own.grad is not None)
            if found:
                self._leaves, self._marks = {key: weakref.ref(own) for key, own in found.items()}, {}
                self._mark()

    def happened(self) -> bool:
        """Whether the job has changed its parameters since the backward, other than by loading them."""
        alive = self.parameters()
        if (self._agent.loads, self._agent.put_back) != self._handled:
            self._marks = {}
            self._mark()
            return False
        # A job may also make new tensors in each step; then no old one is left.
        by_count = not self._alive() or any(self._marks.get(id(each), each._version) != each._version for each in alive)
        self._counted = self._counted or by_count
        if not by_count and (self._counted or self._values == self._read()):
            return False
        self._marks = {}
        self._leaves = {id(each): self._leaves[id(each)] for each in self._alive()}
        return True

    def _mark(self) -> None:
        if not self._marks:
            self._handled = (self._agent.loads, self._agent.put_back)
            self._values = [] if self._counted else self._read()
        for each in self.parameters():
            self._marks.setdefault(id(each), each._version)

    def _read(self) -> list[str]:
        smallest = sorted((local(each) for each in self._of_marks()), key=lambda each: int(each.numel()))[:_FEW]
        return plain_of_each(self._torch, [each.detach().flatten()[:_MOST_ELEMENTS] for each in smallest])

    def _of_marks(self) -> list[Any]:
        """The parameters that were there at the mark; all, if there is none yet."""
        return [each for each in self.parameters() if not self._marks or id(each) in self._marks]


def _nothing() -> None:
    return None


def _leaves(roots: Any) -> Iterator[Any]:
    """The tensors for which a backward from these roots makes gradients, each once, in the order of the graph."""
    roots = roots if isinstance(roots, (list, tuple)) else [roots]
    nodes = [node for root in roots if (node := getattr(root, "grad_fn", getattr(root, "node", None))) is not None]
    seen = set(nodes)
    for node in nodes:
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for after, _number in node.next_functions:
            if after is not None and after not in seen and len(seen) < _MOST_NODES:
                seen.add(after)
                nodes.append(after)
