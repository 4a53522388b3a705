"""Death of one node: its ranks stop, and the other ranks continue until they need them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from resumes import recorded
from saves import Disk, table

from torchaos.harness.crash_explorer import state_selection
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.state_selection import MODELS, models_of, nodes_of
from torchaos.harness.interfaces import UsageError

NODES = {0: 0, 1: 1}


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def test_survivors_go_on_until_they_need_the_dead(blobs: Blobs) -> None:
    """When a node dies, the other still finishes its shard, and waits in the barrier before the marker. All that it
    leaves, the death of all processes can leave too."""
    recording = table(blobs, 2)
    found = list(state_selection.node_death_states(recording, NODES))
    sizes = [{path: content.size for path, content in state.tree.files.items()} for state in found]
    assert {"shard-1": 30} in sizes  # rank 0 died before it did anything
    assert {"shard-0": 30} in sizes
    assert not any("marker" in " ".join(each) and len(each) < 3 for each in sizes)
    everything = {
        state.digest for state in state_selection.process_death_states(CrashPoints(recording, symmetry=False))
    }
    whole = {state.digest for state in found if not any(c.size in (10, 20) for c in state.tree.files.values())}
    assert whole <= everything


def test_they_go_on_for_a_limited_time(blobs: Blobs) -> None:
    """Survivors are ended when they have gone on for as long as the launcher takes to notice."""
    disk = Disk(blobs)
    disk.rank(0).mkdir("0")
    for number in range(5):
        disk.rank(1).mkdir(f"1-{number}")
    ahead = [
        max((len(s.tree.folders - {"0"}) for s in state_selection.node_death_states(disk.recording(), NODES, seconds)
             if "0" not in s.tree.folders), default=0)
        for seconds in (0.5, 3.0, 100.0)
    ]  # fmt: skip
    assert ahead == [0, 2, 5]


def test_a_file_in_many_writes_is_torn_once(blobs: Blobs) -> None:
    """However many writes a file takes, a node dies before them, in the middle, and after them."""
    disk = Disk(blobs)
    disk.rank(0).save("large", *[b"x" * 10] * 50)
    sizes = [
        state.tree.files["large"].size
        for state in state_selection.node_death_states(disk.recording(), NODES)
        if state.operations
    ]
    assert sizes == [0, 10, 500]


def test_a_model_must_fit_the_job() -> None:
    """A job with one node has no death of a node. `all` leaves out what does not fit, and the disks of nodes, as nobody
    knows where checkpoints lie."""
    plan = recorded().plan
    two = replace(plan, job=replace(plan.job, nodes=2, world_size=4))
    with pytest.raises(UsageError, match="node-death is process-death"):
        models_of(["node-death"], plan)
    assert set(MODELS) - set(models_of(["all"], plan)) == {"node-death", "node-death-local"}
    assert set(MODELS) - set(models_of(["all"], two)) == {"node-death-local"}
    assert set(models_of(["all", "node-death-local"], two)) == set(MODELS)
    assert nodes_of(two.job) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_other_moments_are_not_searched(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of a node alone needs no other order of the ranks, so these are not searched, and nothing is said about
    moments that were left out."""
    monkeypatch.setattr(state_selection, "CrashPoints", lambda _recording: pytest.fail("other orders are searched"))
    assert "There may be more" not in state_selection.chosen(table(blobs, 2), ["node-death"], NODES, None, 0).in_words


def test_a_node_with_a_disk_of_its_own_takes_its_files_along(blobs: Blobs) -> None:
    """With local checkpoints nothing that a rank of the dead node wrote is left, and what is missing is named."""
    recording = table(blobs, 2)
    found = list(state_selection.node_death_states(recording, NODES, local=True))
    assert all(len({path for path in state.tree.files if path.startswith("shard")}) < 2 for state in found)
    last = max(found, key=lambda state: state.operations)
    assert {operation.rank for operation in last.lost} in ({0}, {1})
