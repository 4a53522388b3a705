"""The modules and optimizers of the process, found among all objects.

`gc.freeze`, with which a job keeps garbage collections short, takes all objects that exist out of the list of
`gc.get_objects`. So the ones of interest are remembered before that."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_frozen: dict[int, weakref.ref[Any]] = {}  # by id


def live_objects() -> Iterator[Any]:
    """All objects that the garbage collector knows, and the modules and optimizers that the job has frozen."""
    yield from gc.get_objects()
    if gc.get_freeze_count():
        yield from (alive for ref in list(_frozen.values()) if (alive := ref()) is not None)


def watch_freezes(module: type, careful: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Patches `gc.freeze`. `module`: torch.nn.Module; `careful`: keeps errors of the agent from the job."""
    original, remember = gc.freeze, careful(functools.partial(_remember, module))

    @functools.wraps(original)
    def freeze() -> None:
        remember()
        original()

    gc.freeze = freeze


def _remember(module: type) -> None:
    wanted = dict[type, bool]()
    for each in gc.get_objects():
        kind = type(each)
        if kind not in wanted:
            wanted[kind] = bool(kind.__weakrefoffset__) and (issubclass(kind, module) or may_optimize(kind))
        if wanted[kind]:
            _frozen[id(each)] = weakref.ref(each)


def may_optimize(kind: type) -> bool:
    """Whether objects of this class may be optimizers: it has a method `step`, and is not torch's."""
    if not kind.__dictoffset__ or str(kind.__module__).partition(".")[0] == "torch":
        return False
    return any("step" in vars(base) for base in kind.__mro__)
