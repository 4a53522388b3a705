"""Shrinking: exactly the needed faults are left. A fault that waited for a removed fault still comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.minimize.scenario_shrink import Child, Ran, Shrink, ddmin, with_faults
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.planner.job_plan import check_script
from torchaos.harness.scenario.loader import load


@given(st.integers(1, 24).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1))))
def test_ddmin_finds_exactly_what_is_needed(case: tuple[int, set[int]]) -> None:
    """Whatever the items that a failure needs together, they are what is left, in order."""
    size, needed = case
    assert ddmin(range(size), lambda part: needed <= set(part)) == sorted(needed)


@given(st.integers(2, 12), st.data())
def test_without_any_one_of_what_is_left_it_does_not_fail(size: int, data: st.DataObject) -> None:
    """Also where any of several sets would do."""
    sets = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=3))

    def fails(part: Sequence[int]) -> bool:
        return any(needed <= set(part) for needed in sets)

    left = ddmin(range(size), fails)
    assert fails(left)
    assert not any(fails([one for one in left if one != gone]) for gone in left)


SCENARIO: dict[str, Any] = {
    "scenario": "day-round-000",
    "job": {"command": "torchrun --nproc-per-node 2 train.py"},
    "faults": [
        {"id": "a", "inject": "process.kill", "target": {"rank": 0}, "when": {"time": "1s"}},
        {"id": "b", "inject": "process.kill", "target": {"rank": 0},
         "when": {"time": "2s", "after": "a", "state": "recovered", "delay": "5s"}},
        {"id": "c", "inject": "process.kill", "target": {"rank": 0},
         "when": {"time": "3s", "after": "b", "state": "recovered", "delay": "5s"}},
        {"id": "d", "inject": "process.kill", "target": {"rank": 0}, "when": {"after": "c", "delay": "7s"}},
    ],
    "assert": ["recovery_time"],
}  # fmt: skip


def whens(*names: str) -> list[dict[str, Any]]:
    kept = [fault for fault in SCENARIO["faults"] if fault["id"] in names]
    return [fault["when"] for fault in with_faults(SCENARIO, kept)["faults"]]


def test_a_fault_waits_for_what_the_missing_one_waited_for() -> None:
    """Through as many as are gone; with none left, its time alone, or its delay, counts from the launch."""
    assert whens("a", "c") == [{"time": "1s"}, {"time": "3s", "after": "a", "state": "recovered", "delay": "5s"}]
    assert whens("c") == [{"time": "3s"}]
    assert whens("d") == [{"time": "7s"}]
    assert whens("a", "d")[1] == {"after": "a", "delay": "7s"}
    assert whens("a", "b", "c", "d") == [fault["when"] for fault in SCENARIO["faults"]]


class Scripted(Child):
    """Instead of a run: failed when all of `needed` are among the faults, `luck` times of ten."""

    def __init__(self, needed: set[str], luck: Sequence[bool] = (True,)) -> None:
        super().__init__()
        self._needed, self._luck, self.runs = needed, list(luck), 0

    def run(
        self, scenario: dict[str, Any], home: Path, seed: int, consent: Sequence[str], fds: Sequence[int] = ()
    ) -> Ran:
        self.runs += 1
        failed = (
            self._needed <= {fault["id"] for fault in scenario["faults"]} and self._luck[self.runs % len(self._luck)]
        )
        verdict = Verdict.FAILED if failed else Verdict.PASSED
        case = Case("recovery_time", "assertion", verdict, "")
        return Ran(int(failed), Result("x", "", seed, verdict, int(failed), "", str(home), "", 0.0, cases=(case,)))


def shrunk(tmp_path: Path, child: Child, n: int = 1, k: int = 1) -> tuple[Shrink, list[str] | None]:
    told: list[str] = []
    task = Shrink(SCENARIO, 3, (), frozenset({"recovery_time"}), tmp_path / "tries", n, k, told.append, child)
    found = task()
    return task, None if found is None else [fault["id"] for fault in found["faults"]]


@pytest.mark.parametrize("needed", [{"a"}, {"d"}, {"a", "d"}, {"b", "c"}, {"a", "b", "d"}])
def test_only_the_needed_faults_are_left(tmp_path: Path, needed: set[str]) -> None:
    """And the head of the file says what was tried, and how often it failed."""
    task, left = shrunk(tmp_path, Scripted(needed))
    assert left == sorted(needed)
    assert "1 of 1 failed: a, b, c, d" in task.evidence()
    assert yaml.safe_load(task.evidence()) is None, "it is a comment"


def test_bad_luck_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    """A failure that comes two times of three is found with k of n, and no try is made that can't matter any more."""
    child = Scripted({"b"}, luck=(False, True, True))
    task, left = shrunk(tmp_path, child, n=3, k=2)
    assert left == ["b"]
    assert all(one.tries <= 3 for one in task.tried)
    assert all(one.tries == 2 for one in task.tried if one.failed == 0), "two passed of three: two can't fail any more"


def test_what_does_not_fail_again_is_not_shrunk(tmp_path: Path) -> None:
    """Nothing is claimed of it."""
    assert shrunk(tmp_path, Scripted({"nothing like it"}))[1] is None


def test_a_run_that_could_not_be_made_ends_it(tmp_path: Path) -> None:
    """A usage error in a try is no answer."""

    class Broken(Scripted):
        def run(self, *given: Any, **more: Any) -> Ran:
            ran = super().run(*given, **more)
            return replace(ran, code=int(ExitCode.ROLLBACK))

    with pytest.raises(ChaosError, match="could not be made"):
        shrunk(tmp_path, Broken({"a"}))


def test_only_what_failed_can_be_shrunk(tmp_path: Path) -> None:
    """A run that passed, or is inconclusive, says so."""
    result = Result("x", "", 0, Verdict.INCONCLUSIVE, 2, "", "", "", 0.0)
    with pytest.raises(UsageError, match="is inconclusive, not failed"):
        Shrink.of(RunDir(tmp_path), result, tmp_path, 1, 1, print)


def test_a_round_gets_a_folder_of_its_own_for_each_try(tmp_path: Path) -> None:
    """The checkpoints of the game day are not touched: what the job finds is what the try itself has made."""
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "day.json").write_text(json.dumps({}))
    shared = f"{tmp_path}/day/job"
    scenario = {
        **SCENARIO,
        "job": {"command": f"torchrun t.py {shared}/ckpt", "checkpoints": {"path": f"{shared}/ckpt"}},
    }
    seen: list[dict[str, Any]] = []

    class Looking(Scripted):
        def run(self, scenario: dict[str, Any], home: Path, *given: Any, **more: Any) -> Ran:
            seen.append(scenario["job"])
            assert scenario["job"]["checkpoints"]["path"] == f"{home}/job/ckpt"
            return super().run(scenario, home, *given, **more)

    task = Shrink(scenario, 3, (), frozenset({"recovery_time"}), tmp_path / "t", 1, 1, print, Looking({"a"}))
    assert task() is not None
    assert not any(shared in job["command"] for job in seen)


@pytest.fixture
def failed(tmp_path: Path) -> tuple[RunDir, Callable[..., dict[str, Any]]]:
    """A run directory elsewhere than the scenario; and what shrinking takes from it for a job and a working
    directory."""
    folder = RunDir(tmp_path / "runs" / "a")
    folder.root.mkdir(parents=True)

    def taken(job: dict[str, Any], options: str = "") -> dict[str, Any]:
        home = tmp_path / "mine"
        (home / "sub").mkdir(parents=True, exist_ok=True)
        scenario = {**SCENARIO, "job": {"command": "torchrun --nproc-per-node 2 train.py", "world_size": 2, **job}}
        file = home / "scenario.yaml"
        file.write_text(yaml.safe_dump(scenario))
        for script in (home, home / "sub", tmp_path):
            (script / "train.py").touch()
        folder.scenario.write_bytes(file.read_bytes())
        make_plan(load(file), file, 3).write(folder.plan)
        result = Result("x", "", 3, Verdict.FAILED, 1, "", "", "", 0.0, reproduce=f"torchaos run s.yaml {options}")
        return Shrink.of(folder, result, tmp_path / "tries", 1, 1, print).scenario

    return folder, taken


@pytest.mark.parametrize("cwd", [None, ".", "sub", "..", "{here}", "{here}/sub", "sub/../sub"])
def test_a_try_finds_the_files_of_the_job(
    failed: tuple[RunDir, Callable[..., dict[str, Any]]], tmp_path: Path, cwd: str | None
) -> None:
    """A scenario names its files relative to itself, and each try has a folder of its own: whatever the working
    directory is, the try starts the same script."""
    there = {} if cwd is None else {"cwd": cwd}
    found = failed[1]({**there, "env": {"DATA": "{here}/data"}})
    at = tmp_path / "try.yaml"
    at.write_text(yaml.safe_dump(found))
    again = load(at)
    check_script(again.job, again.launcher, at)
    assert Path(found["job"]["cwd"]).resolve() == (tmp_path / "mine" / (cwd or ".").replace("{here}", ".")).resolve()
    assert found["job"]["env"]["DATA"] == str(tmp_path / "mine" / "data")


def test_a_folder_that_can_t_be_known_is_told(
    failed: tuple[RunDir, Callable[..., dict[str, Any]]], tmp_path: Path
) -> None:
    """With an absolute working directory nothing shows where the scenario was: that matters only if it says {here}."""
    assert failed[1]({"cwd": str(tmp_path)})["job"]["cwd"] == str(tmp_path)
    with pytest.raises(UsageError, match="names files relative to its own folder, which is not known"):
        failed[1]({"cwd": str(tmp_path), "env": {"DATA": "{here}/data"}})


def test_a_try_is_of_what_was_run(failed: tuple[RunDir, Callable[..., dict[str, Any]]]) -> None:
    """With the values of --set, which the file lacks, and once, also if the scenario is to be repeated."""
    found = failed[1]({}, "--set faults.0.when.time=9s --set repeat.times=3 --seed 3")
    assert found["faults"][0]["when"] == {"time": "9s"}
    assert "repeat" not in found


def test_a_job_that_ran_already_is_not_shrunk(failed: tuple[RunDir, Callable[..., dict[str, Any]]]) -> None:
    """Nobody can start it again."""
    folder, taken = failed
    taken({})
    plan = Plan.read(folder.plan)
    replace(plan, job=replace(plan.job, attach_pid=4711)).write(folder.plan)
    result = Result("x", "", 3, Verdict.FAILED, 1, "", "", "", 0.0)
    with pytest.raises(UsageError, match="its job ran already"):
        Shrink.of(folder, result, folder.root, 1, 1, print)
