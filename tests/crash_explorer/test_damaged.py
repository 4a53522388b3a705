"""States that a death left, and that a `checkpoint.*` fault has hit before the job is started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resumes import after_step, recorded
from saves import Disk

from torchaos.harness.analysis.checkpointing.damage_reaction import damages
from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.crash_explorer.exploration import faults_of, with_damage
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.state_selection import Choice, chosen
from torchaos.harness.interfaces import Target, UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.record.record import Record


def _fault(inject: str, **params: Any) -> PlannedFault:
    return PlannedFault("rot", inject, "node", Target((), (0,)), After(), {"newest": 1, "seed": 3, **params}, "", "")


def _choice(folder: Path) -> Choice:
    """The states of a job that writes step-1.pt and then step-2.pt, each by two writes."""
    disk = Disk(Blobs(folder / "blobs"))
    for step in (1, 2):
        torch.save({"model": {"w": torch.full((256,), float(step))}, "step": step}, folder / "made")
        data = (folder / "made").read_bytes()
        disk.rank(0).save(f"step-{step}.pt", data[:700], data[700:])
    return chosen(disk.recording(), ["process-death"], {}, None, 0)


def test_the_newest_complete_checkpoint_of_each_state_is_hit(tmp_path: Path) -> None:
    """A half-written step-2.pt is left as it is, and step-1.pt before it is damaged. A state without a complete
    checkpoint can't be hit. All other files share their bytes with the undamaged state."""
    plain = _choice(tmp_path)
    found = with_damage(plain, [_fault("checkpoint.flip_bits")], tmp_path / "job" / "checkpoints")
    more = found.states[len(plain.states) :]
    assert found.states[: len(plain.states)] == plain.states
    assert found.there_are == len(found.states)
    whole = {state.name for state in plain.states if "step-1.pt" in state.tree.files}
    torn = {state.name for state in plain.states if not state.tree.files.get("step-1.pt")}
    assert {state.name.removesuffix("-rot") for state in more} <= whole - torn
    hit = {
        state.name: _changed(next(one for one in plain.states if f"{one.name}-rot" == state.name), state)
        for state in more
    }
    assert {path for paths in hit.values() for path in paths} == {"step-1.pt", "step-2.pt"}
    half = [state for state in more if state.tree.files.get("step-2.pt") and hit[state.name] == ["step-1.pt"]]
    assert half
    assert all(len(paths) == 1 for paths in hit.values())
    assert not (tmp_path / "job" / "checkpoints").exists()
    half[0].write_to(tmp_path / "again")
    assert torch.load(tmp_path / "again" / "step-1.pt")["model"]["w"].ne(1.0).sum() <= 1


def _changed(was: Any, now: Any) -> list[str]:
    assert was.tree.files.keys() == now.tree.files.keys()
    return [path for path, content in now.tree.files.items() if content != was.tree.files[path]]


def test_a_deleted_file_is_not_in_the_state(tmp_path: Path) -> None:
    """checkpoint.delete takes a file away, and no other file changes."""
    plain = _choice(tmp_path)
    found = with_damage(plain, [_fault("checkpoint.delete", what="shard")], tmp_path / "job")
    last = found.states[-1]
    assert set(plain.states[-1].tree.files) - set(last.tree.files) == {"step-2.pt"}


def test_permissions_can_t_be_part_of_a_state(tmp_path: Path) -> None:
    """A fault that changes no bytes is refused, and a scenario without a fault that hits checkpoints too."""
    with pytest.raises(UsageError, match=r"rot: checkpoint\.permissions changes permissions"):
        with_damage(_choice(tmp_path), [_fault("checkpoint.permissions")], tmp_path / "job")
    plan = recorded().plan
    with pytest.raises(UsageError, match="no fault checkpoint"):
        faults_of(plan)
    assert faults_of(replace(plan, faults=(_fault("checkpoint.flip_bits"),)))[0].id == "rot"


def test_the_resume_is_judged_with_the_damage(tmp_path: Path) -> None:
    """What the fault did is part of the events before the resume, just after the death, so that a job may go back to an
    older checkpoint than the damaged one."""
    run = recorded()
    plain = _choice(tmp_path)
    state = with_damage(plain, [_fault("checkpoint.zero_block", bytes=512)], tmp_path / "job").states[-1]
    (tmp_path / "events").mkdir()
    synthetic_crash.write(tmp_path / "events", run, after_step(run, 12), {}, 1000.0, damage=state.damage)
    found = Record(synthetic_crash.with_death(run.plan), tuple(read_events(tmp_path / "events")), {})
    (damage,) = damages(found)
    assert damage.checkpoint == str(tmp_path / "job" / "step-2.pt")
    assert damage.at_s == synthetic_crash.death_s(found)
    assert [event.kind for event in found.events[-2:]] == [Kind.EFFECT, Kind.EFFECT]
