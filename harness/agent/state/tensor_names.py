"""The tensors that a job trains or carries, by name (`TensorNames`)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...protocol.check_sums import plain_name
from .live_objects import live_objects, may_optimize

_ALWAYS, _TRIES = 2, 4  # the searches that are always made, and the most
_DEEP = 4  # containers inside each other
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")

Named = dict[str, Any]  # tensors by name


class TensorNames:
    """The tensors of the job by name. The names are those of the outermost module, without the parts that wrappers
    (DDP, torch.compile, FSDP, activation checkpointing) add. They get the module's class as a prefix in two cases:
    nothing is trained in the module, such as an average or a teacher (`AveragedModel:0.weight`); or two trained modules
    have the same name for a parameter, such as a generator and a critic. Modules of one class are numbered in the order
    in which the optimizers train them: `Sequential#2:0.weight`. A name that two tensors still share is left out. A
    parameter that an optimizer trains and no module has is named by its place there: `SGD:param_groups.0.3`.

    Modules, and optimizers of plain classes (Muon in many scripts), are searched among all objects of the process: the
    first two times, and up to twice more if an optimizer trains a parameter that has no name."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._tries = torch, 0
        self._modules: list[weakref.ref[Any]] = []  # the outermost ones
        self._plain: list[weakref.ref[Any]] = []  # optimizers of plain classes
        self._beside: list[weakref.ref[Any]] = []  # parameters that these train and torch's do not
        # The outermost modules that have parameters, each with the prefix of its names.
        self._kinds: list[tuple[weakref.ref[Any], str]] = []
        self._order: dict[int, tuple[weakref.ref[Any], str]] = {}  # parameters with their names, by id
        self._nameless: set[int] = set()  # ids of parameters that have none

    def look(self, optimizers: Sequence[Any], reached: Sequence[Any] = ()) -> dict[str, Named]:
        """All tensors by kind and name. The kinds: `parameters` that torch's optimizers train (without any: those that
        losses have `reached`); `frozen`, all other parameters; `buffers`; and `moments`, what the optimizers keep. Also
        `unsaved`: the buffers that their module keeps out of its state_dict; and `trained`: the parameters, frozen or
        not, that get gradients and belong to an optimizer of any class."""
        found, names = self._found(parameters(optimizers) or reached, _ALWAYS)
        trained = {id(each) for each in parameters(optimizers) or reached}
        of_none = _unique(_in_no_module(optimizers, names))
        found["parameters"] |= of_none
        names |= {id(each): name for name, each in of_none.items()}
        found["moments"] = _unique([*_of_optimizers(optimizers, names), *self._of_plain_classes(names)])
        listed = {name for optimizer in _alive(self._plain) for name in self._trained_by(optimizer, names)}
        own = found["parameters"] if optimizers or not listed else {}
        of_plain = {
            name: each for what in ("parameters", "frozen") for name, each in found[what].items() if name in listed
        }
        found["trained"] = {name: each for name, each in {**own, **of_plain}.items() if each.requires_grad}
        beside = [each for name, each in sorted(found["trained"].items()) if id(each) not in trained]
        self._beside = [weakref.ref(each) for each in beside]
        return found

    def modes(self) -> dict[str, str]:
        """The modes of modules, "train" or "eval", by name: those of the outermost modules with parameters, and those
        of inner modules with another mode than the module around them."""
        found = dict[str, str]()
        for ref, kind in self._kinds:
            modes = dict[str, bool]()
            for path, child in getattr(ref(), "named_modules", tuple)():
                modes[path] = bool(child.training)
                if not path or modes[path] != modes[path.rpartition(".")[0]]:
                    found[kind + plain_name(path)] = "train" if modes[path] else "eval"
        return found

    def beside(self) -> list[Any]:
        """The parameters that only optimizers of plain classes train, at the last `look`, in the order of their
        names."""
        return _alive(self._beside)

    def in_order(self, trained: Sequence[Any]) -> list[Any]:
        """The parameters in the order of their names, and then those without a name. The order in which optimizers
        train them is another one after a restart, if the job makes new optimizers on its way."""
        names = self._names_of(trained)
        if missing := {id(each) for each, name in zip(trained, names, strict=True) if name is None} - self._nameless:
            self._found(trained)  # the job may have made a parameter, or wrapped its model again
            names = self._names_of(trained)
            self._nameless = missing - self._order.keys()
        by_name = sorted(zip(names, trained, strict=True), key=lambda pair: (pair[0] is None, pair[0] or ""))
        return [each for _name, each in by_name]

    def _names_of(self, trained: Sequence[Any]) -> list[str | None]:
        known = [self._order.get(id(each), (_gone, None)) for each in trained]
        return [name if ref() is each else None for each, (ref, name) in zip(trained, known, strict=True)]

    def _trained_by(self, optimizer: Any, names: Mapping[int, str]) -> list[str]:
        """The names of the parameters that an optimizer of a plain class keeps in a list, or in modules, in order."""
        values = list(vars(optimizer).values())
        found = next(filter(None, (_listed(value, names) for value in values)), [])
        return found or _listed(held_in_modules(values, self._torch), names)

    def _found(self, trained: Sequence[Any], always: int = 0) -> tuple[dict[str, Named], dict[int, str]]:
        """The result of `_named`, after a search of the process for modules if a `trained` parameter has no name, or if
        there were fewer than `always` searches so far."""
        places = {id(each): place for place, each in enumerate(trained)}
        found, names = self._named(places)
        if self._tries < always or (self._tries < _TRIES and not places.keys() <= names.keys()):
            self._tries += 1
            self._search()
            found, names = self._named(places)
        return found, names

    def _search(self) -> None:
        module, optimizer = self._torch.nn.Module, self._torch.optim.Optimizer
        modules, plain = list[Any](), list[Any]()
        found = dict[int, "list[Any] | None"]()  # the list for each class, by the class's id
        for each in live_objects():
            kind = type(each)
            if id(kind) not in found:
                wanted = plain if may_optimize(kind) and not issubclass(kind, optimizer) else None
                found[id(kind)] = modules if issubclass(kind, module) else wanted
            if (of_kind := found[id(kind)]) is not None:
                of_kind.append(each)
        modules = [each for each in modules if "_modules" in vars(each)]  # the others are not initialised
        inner = {id(child) for each in modules for child in each._modules.values()}
        self._modules = [weakref.ref(each) for each in modules if id(each) not in inner]
        self._plain = [weakref.ref(each) for each in plain if type(each).__weakrefoffset__]

    def _named(self, trained: Mapping[int, int]) -> tuple[dict[str, Named], dict[int, str]]:
        """The tensors of the modules, and the name of each parameter by its id. `trained`: the places of the trained
        parameters, by their ids."""
        pairs: dict[str, list[tuple[str, Any]]] = {"parameters": [], "frozen": [], "buffers": [], "unsaved": []}
        modules = [
            (module, {plain_name(name): each for name, each in module.named_parameters()})
            for module in _alive(self._modules)
        ]
        kinds = _kinds(modules, trained)
        self._kinds = [(weakref.ref(module), kind) for (module, own), kind in zip(modules, kinds, strict=True) if own]
        for (module, own), kind in zip(modules, kinds, strict=True):
            for name, each in own.items():
                pairs["parameters" if id(each) in trained else "frozen"].append((kind + name, each))
            unsaved = {
                f"{path}.{name}".lstrip(".")
                for path, child in module.named_modules()
                for name in getattr(child, "_non_persistent_buffers_set", ())
            }
            for name, each in module.named_buffers():
                for what in ("buffers", "unsaved") if name in unsaved else ("buffers",):
                    pairs[what].append((kind + plain_name(name), each))
        found = {what: _unique(of) for what, of in pairs.items()}
        known = [(name, each) for what in ("parameters", "frozen") for name, each in found[what].items()]
        self._order = {id(each): (weakref.ref(each), name) for name, each in known}
        return found, {id(each): name for name, each in known}

    def _of_plain_classes(self, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
        for optimizer in _alive(self._plain):
            attributes = [pair for pair in list(vars(optimizer).items()) if isinstance(pair[1], (list, tuple, dict))]
            trained = self._trained_by(optimizer, names)
            by_key: dict[Any, str] = {**names, **{name: name for name in names.values()}, **dict(enumerate(trained))}
            for name, value in attributes:
                if isinstance(value, dict):
                    for key, kept in list(value.items()):
                        known = by_key.get(id(key) if isinstance(key, self._torch.Tensor) else key)
                        if known is not None:
                            yield from self._tensors(f"{known}/{name}", kept)
                elif trained and len(value) == len(trained):
                    for known, kept in zip(trained, value, strict=True):
                        if id(kept) not in names:
                            yield from self._tensors(f"{known}/{name}", kept)

    def _tensors(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        return tensors_in(name, value, self._torch.Tensor)


def _kinds(modules: Sequence[tuple[Any, Named]], trained: Mapping[int, int]) -> list[str]:
    """The prefix of the names of each module (see TensorNames). `modules`: each with its parameters by name."""
    first, tensors = dict[int, int](), defaultdict[str, set[int]](set)
    for number, (_module, own) in enumerate(modules):
        if places := [trained[id(each)] for each in own.values() if id(each) in trained]:
            first[number] = min(places)
            for name, each in own.items():
                tensors[name].add(id(each))
    classes, alike = [_class_of(module) for module, _own in modules], defaultdict[str, list[int]](list)
    for number in sorted(first, key=lambda number: first[number]):
        if any(len(tensors[name]) > 1 for name in modules[number][1]):
            alike[classes[number]].append(number)
    found = [f"{kind}:" if number not in first else "" for number, kind in enumerate(classes)]
    for kind, numbers in alike.items():
        for place, number in enumerate(numbers, 1):
            found[number] = f"{kind}#{place}:" if len(numbers) > 1 else f"{kind}:"
    return found


def _class_of(module: Any) -> str:
    """The name of the module's class. For a wrapper such as DDP: of the module inside."""
    while type(module).__name__ in _WRAPPERS and (inner := list(module._modules.values())):
        module = inner[0]
    return type(module).__name__


def kind_of(tensor: Any) -> str:
    """The tensor's type and shape as text, such as `float32 4x8`. A DTensor has the shape of the whole tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"


def _gone() -> None:
    return None


def _alive(refs: Sequence[weakref.ref[Any]]) -> list[Any]:
    return [alive for ref in refs if (alive := ref()) is not None]


def _listed(value: Any, names: Mapping[int, str]) -> list[str]:
    """The names of the parameters in a list of parameters or of parameter groups. Empty if `value` is none."""
    if not isinstance(value, (list, tuple)):
        return []
    groups = [each["params"] for each in value if isinstance(each, dict) and isinstance(each.get("params"), list)]
    found = [names.get(id(each)) for each in ([each for group in groups for each in group] or value)]
    return [name for name in found if name is not None] if None not in found else []


def held_in_modules(values: Sequence[Any], torch: Any) -> list[Any]:
    """The parameters of a module, or of a list of modules, among the attributes of an object, in order. Only if another
    attribute is a list with one tensor for each of them: otherwise the object need not be an optimizer."""
    lists = [value for value in values if isinstance(value, (list, tuple))]
    lengths = {len(value) for value in lists if all(isinstance(each, torch.Tensor) for each in value)}
    for value in values:
        modules = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(each, torch.nn.Module) and "_modules" in vars(each) for each in modules):
            held = [each for module in modules for each in module.parameters()]
            if len(held) in lengths:
                return held
    return []


def _of_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    from torch import Tensor

    for optimizer in optimizers:
        for parameter, state in list((getattr(optimizer, "state", None) or {}).items()):
            # ZeroRedundancyOptimizer has None for parameters whose state another rank keeps.
            if (name := names.get(id(parameter))) is not None and isinstance(state, Mapping):
                for key, value in state.items():
                    if key != "step":  # a counter, which is recorded as such
                        yield from tensors_in(f"{name}/{key}", value, Tensor)


def _in_no_module(optimizers: Sequence[Any], names: Mapping[int, str]) -> list[tuple[str, Any]]:
    """The parameters without a name that these optimizers train, such as float32 copies of weights or the weights of a
    model without modules, each with its place in its optimizer."""
    kinds, found = [type(each).__name__ for each in optimizers], list[tuple[str, Any]]()
    for number, (kind, optimizer) in enumerate(zip(kinds, optimizers, strict=True)):
        which = f"{kind}#{kinds[: number + 1].count(kind)}" if kinds.count(kind) > 1 else kind
        found += [
            (f"{which}:param_groups.{group}.{place}", each)
            for group, of in enumerate(optimizer.param_groups) for place, each in enumerate(of["params"])
            if id(each) not in names
        ]  # fmt: skip
    return found


def tensors_in(name: str, value: Any, kind: type, depth: int = _DEEP) -> Iterator[tuple[str, Any]]:
    """The tensors in a value, which may be a container."""
    if isinstance(value, kind):
        yield name, value
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_in(f"{name}.{key}", each, kind, depth - 1)


def _unique(pairs: Sequence[tuple[str, Any]]) -> Named:
    """Tensors by name. Left out are names that several tensors have, and tensors that have no values."""
    named, twice = dict[str, Any](), set[str]()
    for name, each in pairs:
        if each is not None and each.device.type != "meta" and named.setdefault(name, each) is not each:
            twice.add(name)
    return {name: each for name, each in named.items() if name not in twice}


def parameters(optimizers: Sequence[Any]) -> list[Any]:
    """The parameters that these optimizers train, each once, in order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(each): each for group in groups for each in group}.values())
