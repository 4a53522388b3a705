"""Nodes' own disks for checkpoints (job.checkpoints.local), and another command for the next starts of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from malformed import GOOD

from torchaos.harness.analysis.checkpointing.checkpoint_contents import DISK_LOST, out_of_reach
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Save
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers.job_factory import _spec
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load
from torchaos.harness.scenario.yaml_source import ScenarioError

LOCAL = '{path: "{run}/out", local: "{run}/out/local"}'


@pytest.fixture(autouse=True)
def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun is that of this Python."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def _up(attempt: int, rank: int, node: int) -> Event:
    return Event(Kind.RANK_UP, "harness", 0, 0.0, 10.0 * attempt, rank, attempt, None, {"node": node})


def _save(rank: int, folder: str = "local/step-5") -> Save:
    return Save(f"/job/out/{folder}/rank-{rank}.pt", "torch", 0, 5, (rank,), 5.0, 6.0, True, 0.1, 5)


def _run(trainer: Any, *events: Event) -> Any:
    run = trainer().record(inventory={"root": "/job/out", "checkpoints": []})
    job = replace(run.plan.job, checkpoints="{run}/out", checkpoints_local="{run}/out/local")
    return replace(run, plan=replace(run.plan, job=job), events=events)


@pytest.mark.parametrize(
    ("events", "nodes", "ranks"),
    [
        ([_up(1, 0, 0), _up(1, 1, 1)], (), ()),  # both nodes are back
        ([_up(1, 0, 0), _up(1, 1, 2)], (1,), (1,)),  # another node took the place of node 1
        ([_up(1, 0, 0)], (1,), (1,)),  # the job shrank
        ([], (), ()),  # which nodes it has is not known
    ],
)
def test_files_on_the_disk_of_a_node_that_is_gone_are_out_of_reach(
    trainer: Any, events: list[Event], nodes: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    """As are those outside the folder of the checkpoints, such as in memory. Other files are within reach of every
    attempt."""
    run = _run(trainer, _up(0, 0, 0), _up(0, 1, 1), *events)
    memory = replace(_save(1), path="/dev/shm/step-5/rank-1.pt")
    found = out_of_reach(run, [_save(0), _save(1), _save(1, "step-5"), memory], 1, 10.0)
    assert found.nodes == nodes
    assert found.paths - {memory.path} == {f"/job/out/local/step-5/rank-{rank}.pt" for rank in ranks}
    assert (memory.path in found.paths) == bool(ranks)


def test_a_disk_that_was_lost_has_only_what_was_saved_later(trainer: Any) -> None:
    """The node itself is back, with an empty disk."""
    lost = Event(Kind.EFFECT, "harness", 1, 0.0, 8.0, data={"fault": "f", "what": DISK_LOST, "node": 1, "effect": ""})
    run = _run(trainer, _up(0, 0, 0), _up(0, 1, 1), lost, _up(1, 0, 0), _up(1, 1, 1))
    assert out_of_reach(run, [_save(0), _save(1)], 1, 10.0).nodes == (1,)
    assert out_of_reach(run, [replace(_save(1), begun_s=8.5)], 1, 10.0).nodes == ()
    assert out_of_reach(run, [_save(1)], 1, 7.0).nodes == ()


def _planned(folder: Path, **changes: str) -> Plan:
    path = folder / "scenario.yaml"
    text = GOOD
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    return make_plan(load(path), path, 0)


def _checkpoints() -> str:
    return next(line for line in GOOD.splitlines() if line.strip().startswith("checkpoints:"))


@pytest.mark.parametrize(
    ("checkpoints", "says"),
    [(LOCAL, "launcher: local gives no node"), (LOCAL.replace("/out/local", "/elsewhere"), "below path")],
)
def test_a_local_disk_that_can_t_be_is_refused(tmp_path: Path, checkpoints: str, says: str) -> None:
    """By a launcher without nodes of its own, and outside the folder of the checkpoints."""
    with pytest.raises((UsageError, ScenarioError), match=says):
        _planned(tmp_path, **{_checkpoints(): f"  checkpoints: {checkpoints}"})


def test_the_next_starts_have_their_own_command_and_environment(tmp_path: Path) -> None:
    """The first start has those of the job."""
    (tmp_path / "next.py").touch()
    again = '  resubmit: {times: 1, command: "torchrun --nproc-per-node 1 next.py --dir {run}", env: {VERSION: two}}'
    plan = _planned(tmp_path, **{_checkpoints(): f"{_checkpoints()}\n{again}"})
    specs: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
    for submission in (0, 1, 2):
        spec = _spec(plan, RunDir(tmp_path / "run"), "run", submission)
        specs.append((spec.argv, spec.own_env))
    assert "VERSION" not in specs[0][1]
    assert specs[0][0] != specs[1][0] == specs[2][0]
    assert specs[1][0][1:] == ("--nproc-per-node", "1", "next.py", "--dir", str(RunDir(tmp_path / "run").job))
    assert specs[1][1]["VERSION"] == "two"


def test_a_script_of_the_next_starts_must_be_there(tmp_path: Path) -> None:
    """The error says where the command stands."""
    again = "  resubmit: {times: 1, command: torchrun --nproc-per-node 1 gone.py}"
    with pytest.raises(UsageError, match=r"scenario.yaml:\d+:\d+: .*gone.py: there is no such file"):
        _planned(tmp_path, **{_checkpoints(): f"{_checkpoints()}\n{again}"})
