"""What a resume asks of the checkpoint folder before it fails: which files exist and how long they are, which names a
folder has, and the bytes of files. Two states that give the same answers lead to the same failure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from torchaos.harness.exploring.cover import Cover
from torchaos.harness.exploring.tree import Tree


class Ask(str, Enum):
    """A question about a path."""

    IS = "is"  # what is there: nothing, a folder, a link and its target, or a file and its size
    NAMES = "names"  # of what a folder contains
    BYTES = "bytes"  # of a file


@dataclass(frozen=True)
class Looks:
    """The questions that were asked, as pairs of a question and a path."""

    asked: frozenset[tuple[Ask, str]]

    def same(self, one: Tree, other: Tree) -> bool:
        """Whether both trees answer all these questions alike."""
        return all(_answer(one, *asked) == _answer(other, *asked) for asked in self.asked)

    def to_json(self) -> list[list[str]]:
        return sorted([ask.value, path] for ask, path in self.asked)

    @classmethod
    def from_json(cls, raw: Iterable[tuple[str, str]]) -> Looks:
        return cls(frozenset((Ask(ask), path) for ask, path in raw))


def _answer(tree: Tree, ask: Ask, path: str) -> object:
    content = tree.files.get(path)
    if ask is Ask.BYTES:
        return content.digest if content else None
    if ask is Ask.NAMES:
        return tree.names.get(path)
    return ("file", content.size) if content else tree.links.get(path, path in tree.names)


class Looker(Cover):
    """Notes what is asked of the folder in a `with` block. `home` must be fresh."""

    server = f"{__package__}.looking"
    notes = ("looks",)

    def until(self, end_s: float) -> Looks | None:
        """The questions before `end_s` (CLOCK_MONOTONIC), after the `with` block. None if not all are known, or if none
        was about the contents: then the failure does not come from the folder."""
        lines = (self._home / "looks").read_text().splitlines() if not self.failed else ()
        found = Looks.from_json((ask, path) for at_s, ask, path in map(json.loads, lines) if at_s < end_s)
        return found if found.asked - {(Ask.IS, "")} else None
