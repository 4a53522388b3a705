"""An exploration that was never run: two saves, the states that deaths leave, and invented outcomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from saves import Disk

from torchaos.harness.crash_explorer.exploration_summary import ExplorationSummary
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, OutcomeClass
from torchaos.harness.crash_explorer.state_selection import Choice, chosen


def saves(folder: Path, in_turn: bool = True) -> Recording:
    """Rank 0 writes a file in place, twice. Rank 1 writes a file of its own: after rank 0 (`in_turn`), or at the same
    time."""
    disk = Disk(Blobs(folder / "blobs"))
    for number in (1, 2):
        disk.rank(0).save("last.pt", b"a" * 100 * number, b"b" * 50)
        if in_turn:
            disk.barrier(0, 1)
        disk.rank(1).save(f"rng-{number}", b"c" * 10)
        if in_turn:
            disk.barrier(0, 1)
    return disk.recording()


def choice(recording: Recording) -> Choice:
    return chosen(recording, ["process-death"], {}, None, 0)


def outcome_of(state: State, kind: OutcomeClass = OutcomeClass.RIGHT, reason: str = "") -> Outcome:
    return Outcome(
        state.name, state.digest, state.model, 7, kind, reason, operations=state.operations,
        warm=kind is OutcomeClass.RIGHT, seconds=0.5, last_operation=str(state.last_operation or ""),
        moments=state.moments,
        lost_steps=5 if kind is OutcomeClass.LOST_WORK else None,
        assertion={OutcomeClass.LOST_WORK: "no_lost_work", OutcomeClass.WRONG: "loss_continuity"}.get(kind, ""),
    )  # fmt: skip


def explored(folder: Path, **kinds: OutcomeClass) -> ExplorationSummary:
    """`kinds`: classes by the number of operations before the death, such as `at_3`; all other outcomes are right."""
    recording = saves(folder)
    there = choice(recording)
    found = [
        outcome_of(state, kind, f"why it is {kind.value} <script>") if kind else outcome_of(state)
        for state in there.states
        for kind in [kinds.get(f"at_{state.operations}")]
    ]
    return ExplorationSummary(tuple(found), there, recording, recording.ended_s, "by the job's own launcher")


def unconfirmed(found: ExplorationSummary, *but: str) -> ExplorationSummary:
    """As if the time was over before the cold starts, except those of these states."""
    own = [
        one if one.kind is OutcomeClass.RIGHT or one.state in but else replace(one, warm=True) for one in found.outcomes
    ]  # fmt: skip
    return replace(found, outcomes=tuple(own), unfinished="--minutes 4 is over")


def unfinished(found: ExplorationSummary) -> ExplorationSummary:
    return replace(found, outcomes=found.outcomes[:1], unfinished="--minutes 1 is over")
