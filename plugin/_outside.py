"""Stand-ins for the names that need the harness, for use in a rank, where the harness is missing. A stand-in can be
imported and used in annotations; any other use is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class StandIn:
    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{self._name} can't be used in a rank, which has no harness")

    __call__ = __mro_entries__ = _refuse

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{self._name}.{attribute} can't be read in a rank, which has no harness")


def stand_ins(module: str) -> Callable[[str], StandIn]:
    """The function `__getattr__` of a module whose names need the harness."""

    def stand_in(name: str) -> StandIn:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return StandIn(f"{module}.{name}")

    return stand_in
