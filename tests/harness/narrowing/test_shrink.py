"""Shrinking: exactly the needed faults are left. A fault that waited for a removed fault still comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.narrowing.child import Child, Ran
from torchaos.harness.narrowing.ddmin import ddmin
from torchaos.harness.narrowing.shrink import Shrink, with_faults
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir


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
