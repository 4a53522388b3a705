"""The choice of the states to try."""

from __future__ import annotations

from pathlib import Path

import pytest
from saves import Disk, table

from torchaos.harness.crash_explorer import power_loss, state_selection
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.fs_model import State, choose
from torchaos.harness.crash_explorer.power_loss import Persistence


@pytest.fixture
def states(tmp_path: Path) -> list[State]:
    recording = table(Blobs(tmp_path / "blobs"), 3)
    return [
        *state_selection.process_death_states(CrashPoints(recording)),
        *power_loss.states(CrashPoints(recording), Persistence.STRICT),
    ]


def test_equal_files_are_tried_once(states: list[State]) -> None:
    """Of all models, states with equal files are in one group, and the one that was seen and lost nothing is tried."""
    chosen = choose(states)
    assert chosen.there_are == len({state.digest for state in states}) == len(chosen.states)
    assert sum(map(len, chosen.equal)) == len(states)
    assert any(len({state.model for state in group}) == 2 for group in chosen.equal)
    for group in chosen.equal:
        assert bool(group[0].moments) == any(state.moments for state in group)
    assert chosen.in_words.endswith("all are tried")


def test_of_too_many_some_are_chosen(states: list[State]) -> None:
    """The choice has as many as wanted, is the same for the same seed, and another for another."""
    chosen = choose(states, 40, seed=1)
    assert len(chosen.states) == 40 < chosen.there_are
    assert choose(states, 40, seed=1) == chosen
    assert choose(states, 40, seed=2) != chosen
    assert f"{chosen.there_are} different contents" in chosen.in_words
    assert "40 are tried" in chosen.in_words


def test_each_operation_is_the_last_one(tmp_path: Path) -> None:
    """If there is room for it, each operation that changes files is the last one of a state."""
    disk = Disk(Blobs(tmp_path / "blobs"))
    for number in range(6):
        disk.rank(0).save(f"{number}", b"x" * 10, b"y" * 10)
    found = list(power_loss.states(CrashPoints(disk.recording())))
    lasts = {state.last_operation and state.last_operation.number for state in found}
    chosen = choose(found, len(lasts))
    assert len(chosen.states) == len(lasts) < chosen.there_are
    assert lasts == {s.last_operation and s.last_operation.number for group in chosen.equal for s in group}
