"""Turns pydantic's errors into messages for people who write scenarios, one for each place. Also takes the wrong values
out of a file, so that the rest can be checked, and the user sees all mistakes at once: wrong types, and values that do
not fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchaos.harness import registry
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.yaml_source import Keys, Source

_EXPECTED = {
    "int_type": "a whole number", "string_type": "text", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
    "model_attributes_type": "a mapping", "dataclass_type": "a mapping",
}  # fmt: skip


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"), "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"), "less_than": ("less than", "lt"),
}  # fmt: skip


def most_telling(source: Source, error: ValidationError, model: type[BaseModel]) -> dict[Keys, Any]:
    """The most useful error for each place. If a value may have several types, it is the error for the type that was
    most likely intended. A misspelt key is not reported as a missing key too."""
    best: dict[Keys, Any] = {}
    for found in error.errors():
        keys = in_file(source, found)
        known = best.get(keys)
        if known is None or _rank_of(found) > _rank_of(known):
            or_number = known is not None and known["type"] == "int_type"
            best[keys] = {**found, "or": "a whole number or " if or_number else ""}
    meant = {
        (*keys[:-1], meant_key(found, model)) for keys, found in best.items() if found["type"] == "extra_forbidden"
    }
    return {keys: found for keys, found in best.items() if found["type"] != "missing" or keys not in meant}


def _rank_of(found: Any) -> int:
    return 0 if found["type"] in _EXPECTED else 1 if found["type"] == "literal_error" else 2


def in_file(source: Source, found: Any) -> Keys:
    """The place in the file of one of pydantic's errors: without the parts that only the types have (members of unions,
    and items that were brought into one form)."""
    loc, kind, keys = tuple(found["loc"]), found["type"], Keys()
    for part in loc:
        if (*keys, part) in source.values or (*keys, part) in source.keys:
            keys = (*keys, part)
    if (
        kind in ("missing", "extra_forbidden") and keys[-1:] != loc[-1:]
    ):  # the key is missing in the file, or was added by --set
        return (*keys, loc[-1])
    return keys


def words(found: Any, keys: Keys, model: type[BaseModel] = Scenario) -> str:
    """The message for one of pydantic's errors. `keys`: its place in the file."""
    kind, name = found["type"], next((key for key in reversed(keys) if isinstance(key, str)), "scenario")
    if kind == "extra_forbidden":
        near = meant_key(found, model)
        known = f"there are {', '.join(_keys_beside(found['loc'], model))}"
        return f"unknown key {name!r}; {f'did you mean {near!r}?' if near else known}"
    if kind == "missing":
        return f"the key {found['loc'][-1]!r} is missing; add it"
    if kind == "value_error":
        return str(found["ctx"]["error"])
    if kind in ("literal_error", "enum"):
        near = registry.suggest(str(found["input"]), re.findall(r"'([^']*)'", found["ctx"]["expected"]))
        return f"{name} is {found.get('or', '')}{found['ctx']['expected']}, not {_shown(found['input'])}" + (
            f"; did you mean {near!r}?" if near else ""
        )
    if kind == "string_pattern_mismatch":
        return f"{name} is made of small letters, digits, dots and dashes, not {found['input']!r}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{name} is {words} {found['ctx'][bound]:g}, not {_shown(found['input'])}"
    if kind == "string_type" and found["input"] is None:
        return f'{name} is empty here; write it in quotes, "" for an empty text'
    if kind in _EXPECTED:
        return f"{name} is {_EXPECTED[kind]}, not {_shown(found['input'])}"
    if kind == "too_short" and not found["input"]:
        return f"{name} is empty; write at least one"
    return f"{name}: {found['msg'][:1].lower()}{found['msg'][1:]}, not {_shown(found['input'])}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)


def meant_key(found: Any, model: type[BaseModel]) -> str | None:
    """The known key that is most like an unknown key. None if there is none."""
    return registry.suggest(str(found["loc"][-1]), _keys_beside(found["loc"], model))


def _keys_beside(loc: Keys, whole: type[BaseModel]) -> list[str]:
    """The keys that are allowed at the place of an unknown key."""
    model: Any = whole
    for part in loc[:-1]:
        if isinstance(part, str):
            model = next((found for found in _models_in(model, part)), model)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _models_in(model: Any, key: str) -> Iterator[Any]:
    for name, field in model.model_fields.items():
        if (field.alias or name) == key or name == key:
            yield from _find_models(field.annotation)


def _find_models(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _find_models(argument)


Model = TypeVar("Model", bound=BaseModel)
_ROUNDS = 12  # rounds of taking out wrong values: without a value, the mapping around it may be wrong, and so on
_NAME = "stand-in"
# Stand-ins for values that are needed. No check sees them, because checks skip wrong places.
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
        """Whether something was taken out at one of these places, inside it, or around it."""
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
        """Takes out an unknown key. Then the key that was meant is missing. False for other mistakes."""
        if found["type"] != "extra_forbidden":
            return False
        *holding, last = in_file(self._source, found)
        if (holder := self._at(tuple(holding))) is not None:
            holder.pop(last, None)
        if meant := meant_key(found, self._model):
            self._wrong.add((*holding, meant))
        return True

    def _replace(self, keys: Keys) -> None:
        """Puts a stand-in at `keys`, or removes the value. If neither is possible, does the same with the mapping or
        list around it."""
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
