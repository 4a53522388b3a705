"""Ways to save with a known bug: each bug is found under the models of death in which it matters, and not under the
others."""

from __future__ import annotations

from pathlib import Path

import pytest
from protocols import PROCESS, PROTOCOLS, SIZE, Broken, Protocol, data
from saves import Disk

from torchaos.harness.crash_explorer import power_loss, state_selection
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.folder_contents import Blobs, Content, Extent, Tree
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.power_loss import Persistence

SAVES = 3
MODELS = [PROCESS, *(each.value for each in Persistence)]


def _record(protocol: Protocol, blobs: Blobs) -> tuple[Recording, list[int]]:
    """Three saves, and after how many operations each was over."""
    base = Tree({"last": Content(SIZE, (Extent(0, SIZE, blobs.add(data(1))),))} if protocol.first > 1 else {})
    disk, over = Disk(blobs, base), [0] * (protocol.first - 1)
    for number in range(protocol.first, SAVES + 1):
        protocol.save(disk, number)
        over.append(len(disk.operations))
    return disk.recording(), over


def _wrong(protocol: Protocol, recording: Recording, over: list[int], state: State) -> str | None:
    """Why a resume from this state is wrong: it must find the last save that was over, or the one before that."""
    files = {path: recording.blobs.read(content) for path, content in state.tree.files.items()}
    try:
        found = protocol.load(files) or 0
    except Broken as error:
        return f"dies: {error}"
    complete = sum(end <= state.operations for end in over)
    return None if found >= complete - 1 else f"save {complete} was over, and save {found} is all that is left"


def _states(recording: Recording, model: str) -> list[State]:
    if model == PROCESS:
        return list(state_selection.process_death_states(CrashPoints(recording)))
    return list(power_loss.states(CrashPoints(recording), Persistence(model)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_way_to_save(name: str, model: str, tmp_path: Path) -> None:
    """A state that a resume gets wrong is found exactly if the model of death breaks this way to save."""
    protocol, blobs = PROTOCOLS[name], Blobs(tmp_path / "blobs")
    recording, over = _record(protocol, blobs)
    states = _states(recording, model)
    wrong = {state.name: why for state in states if (why := _wrong(protocol, recording, over, state))}
    assert bool(wrong) == (model in protocol.breaks), (len(states), wrong)
    last = states[-1] if model == PROCESS else max(states, key=lambda s: (s.operations, -len(s.lost)))
    assert _wrong(protocol, recording, over, last) is None, "the end of the run is right"


@pytest.mark.parametrize(("size", "torn"), [(SIZE, False), (2 << 20, True)])
def test_a_large_file_that_is_renamed_without_a_sync(size: int, torn: bool, tmp_path: Path) -> None:
    """ext4 keeps the bytes of a small file that is renamed onto another. It promises nothing for a large file."""
    blobs = Blobs(tmp_path / "blobs")
    disk = Disk(blobs, Tree({"last": Content(SIZE, (Extent(0, SIZE, blobs.add(data(1))),))}))
    disk.rank(0).save("tmp", b"2" * size, sync=False)
    disk.rank(0).rename("tmp", "last")
    states = list(power_loss.states(CrashPoints(disk.recording()), Persistence.EXT4))
    left = {state.tree.files["last"].size for state in states}
    assert bool(left - {SIZE, size}) == torn, left
