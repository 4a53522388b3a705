"""What is left of a file without its mistakes, so that one reading tells all of them: those of types, and those of
sense."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchaos.harness.scenario.mistakes import in_file, meant_key
from torchaos.harness.scenario.yaml_source import Keys, Source

Model = TypeVar("Model", bound=BaseModel)
_ROUNDS = 12  # of taking out what is wrong; a value can be needed by its holder, and that by another
_NAME = "stand-in"
# In place of what is needed. No check sees them: they are at places that are wrong.
_STAND_INS: dict[str | int, Any] = {
    "scenario": _NAME, "gameday": _NAME, "gate": _NAME, "job": {"command": "torchrun"}, "command": "torchrun",
    "inject": _NAME, "when": {"step": 1}, "assert": [_NAME], "max_age": "1d", "environments": {_NAME: {}},
    "duration": "1h", "arrivals": {"every": "1h"},
}  # fmt: skip
_ITEMS: dict[str | int, Any] = {
    "faults": {"inject": _NAME, "when": {"step": 1}}, "assert": _NAME, "steady_state": _NAME, "stop": _NAME,
    "until": _NAME,
}  # fmt: skip


class Rest:
    """A file without the values that are wrong."""

    def __init__(self, source: Source, model: type[BaseModel]) -> None:
        self._source, self._model, self._data = source, model, deepcopy(source.data)
        self._wrong, self._stand_ins = set[Keys](), set[Keys]()

    def lacks(self, places: Iterable[Keys]) -> bool:
        """Whether something at one of these places, in it, or around it, was taken out."""
        return any(at[: len(wrong)] == wrong[: len(at)] for at in places for wrong in self._wrong)

    def without(self, error: ValidationError) -> Any:
        """The rest, as the type of the file. None if too much is wrong."""
        for _ in range(_ROUNDS):
            for keys in {in_file(self._source, found): None for found in error.errors() if not self._drop(found)}:
                self._replace(keys)
            try:
                return self._model.model_validate(self._data)
            except ValidationError as again:
                error = again
        return None

    def _drop(self, found: Any) -> bool:
        """Takes out an unknown key. False for other mistakes. The key that was meant is missing, then."""
        if found["type"] != "extra_forbidden":
            return False
        *holding, last = in_file(self._source, found)
        if (holder := self._at(tuple(holding))) is not None:
            holder.pop(last, None)
        if meant := meant_key(found, self._model):
            self._wrong.add((*holding, meant))
        return True

    def _replace(self, keys: Keys) -> None:
        """Puts a stand-in there, or takes the value out. If neither can help, it does so with what holds the value."""
        while keys:
            *holding, last = keys
            holder = self._at(tuple(holding))
            if holder is None:
                return
            is_item, is_new = isinstance(holder, list), keys not in self._stand_ins
            stand_in = _ITEMS.get(keys[-2]) if is_item else _STAND_INS.get(last)
            self._wrong.add(keys)
            if is_new and stand_in is not None:
                self._stand_ins.add(keys)
                holder[last] = deepcopy(stand_in)
                return
            if is_new and not is_item and last in holder:
                del holder[last]
                return
            keys = keys[:-1]

    def _at(self, keys: Keys) -> Any:
        """The mapping or list at this place. None if there is none any more."""
        found: Any = self._data
        for part in keys:
            try:
                found = found[part]
            except (KeyError, IndexError, TypeError):
                return None
        return found if isinstance(found, (dict, list)) else None
