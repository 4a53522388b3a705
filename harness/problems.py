"""What is wrong with a scenario, and how it is said: what, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union

from pydantic_core import PydanticCustomError

from torchaos.harness.contracts import UsageError

Path = tuple[Union[str, int], ...]  # the keys and indices that lead to a value
SHOWN = 60  # characters of a user's text that a message repeats


@dataclass(frozen=True)
class Problem:
    """`path` leads to the value; `text` is the piece of it that is meant, where it is text."""

    path: Path
    what: str
    at_key: bool = False  # the key is wrong, not its value
    text: str = ""


class ScenarioError(UsageError):
    """A scenario that can't be read: one line per problem, `file.yaml:LINE:COLUMN: what; what to do`."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(lines))


def refuse(what: str, at: str = "", text: str = "") -> PydanticCustomError:
    """For validators: a whole sentence, shown as it is. `at` is the key that is meant, `text` the piece of a value."""
    return PydanticCustomError("refused", "{what}", {"what": what, "at": at, "text": text})


def show(value: Any) -> str:
    """A value as the user wrote it, or what kind of thing it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN else value[: SHOWN - 1] + "…")
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "empty"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value)


def name_of(path: Path) -> str:
    """`ranks[1]` for (…, "ranks", 1): the last key, with the indices after it."""
    name = ""
    for part in reversed(path):
        name = f"[{part}]{name}" if isinstance(part, int) else f"{part}{name}"
        if isinstance(part, str):
            break
    return name or "the scenario"


def either(words: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    found = list(dict.fromkeys(words))
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else "".join(found)
