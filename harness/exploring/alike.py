"""States that a resume can't tell apart. From one state, the job failed before its first step, and another state gives
the same answers to all that it had asked of the checkpoint folder. So it fails from the other state in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchaos.harness.exploring.looks import Looks
from torchaos.harness.exploring.outcomes import Outcome
from torchaos.harness.exploring.states.state import State
from torchaos.harness.machine.disk import owner_only


class Alike:
    """The failures that may stand for those of other states. They are kept in the file `looks.jsonl`, so that an
    exploration that goes on knows them."""

    def __init__(self, home: Path, states: Sequence[State]) -> None:
        self._path = home / "looks.jsonl"
        by_key = {(state.digest, state.model): state for state in states}
        self._known: list[tuple[State, Looks]] = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            digest, model, asked = json.loads(line)
            if state := by_key.get((digest, model)):
                self._known.append((state, Looks.from_json(asked)))

    def learn(self, state: State, looks: Looks) -> None:
        """`looks`: what the job asked before it failed from this state."""
        self._known.append((state, looks))
        with open(self._path, "ab", opener=owner_only) as file:
            file.write(json.dumps([state.digest, state.model, looks.to_json()]).encode() + b"\n")

    def of(
        self, state: State, died_at: Callable[[State], int], done: Mapping[tuple[str, str], Outcome]
    ) -> Outcome | None:  # fmt: skip
        """The outcome of the state, from that of a state that looks the same to the job. None if there is none."""
        for other, looks in self._known:
            found = done.get((other.digest, other.model))
            if found and looks.same(other.tree, state.tree):
                return replace(
                    found, state=state.name, digest=state.digest, model=state.model, died_at_step=died_at(state),
                    mended=None, seconds=0.0, operations=state.operations, moments=state.moments, files=(), run_dir="",
                    last_operation=str(state.last_operation or ""), like=other.name,
                )  # fmt: skip
        return None
