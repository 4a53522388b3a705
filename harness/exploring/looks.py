"""What a resume asks of the checkpoint folder: which files exist and how long they are, which names a folder has, and
the bytes of files. If two states give the same answers, a deterministic job does the same from both."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torchaos.harness.agent.wire import Kind
from torchaos.harness.exploring.asks import Ask
from torchaos.harness.exploring.cover import Cover
from torchaos.harness.exploring.tree import Tree
from torchaos.harness.record.record import Record


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
        names = tree.names.get(path)
        return None if names is None else {name: _kind(tree, f"{path}/{name}".lstrip("/")) for name in names}
    if ask is Ask.ALL:
        return tree.below(path).digest
    return ("file", content.size) if content and ask is Ask.IS else _kind(tree, path)


def _kind(tree: Tree, path: str) -> object:
    return "file" if path in tree.files else tree.links.get(path, path in tree.names)


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


class Looked:
    """A `with` block around a resume. Its questions are noted only if there is a folder `home` for the files of the
    server; the folder is removed afterwards."""

    def __init__(self, folder: Path, home: Path | None) -> None:
        self._home = home
        if home:
            shutil.rmtree(home, ignore_errors=True)
        self._looker = Looker(folder, home) if home else None

    def __enter__(self) -> None:
        if self._looker:
            self._looker.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._looker:
            self._looker.__exit__(kind, error, at)

    @property
    def left(self) -> list[str]:
        return self._looker.left if self._looker else []

    @property
    def failed(self) -> str:
        return self._looker.failed if self._looker else ""

    def before_inventory(self, record: Record) -> Looks | None:
        """The questions of the job, without those of the harness, which reads the checkpoints after the job's end."""
        if self._looker is None or self._home is None:
            return None
        stages = record.of_kind(Kind.STAGE)
        ended_s = max((stage.mono_s for stage in stages if stage.data["stage"] == "inventory"), default=math.inf)
        found = self._looker.until(ended_s)
        if not self.left:
            shutil.rmtree(self._home, ignore_errors=True)
        return found
