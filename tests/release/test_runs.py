"""The runs that count for a gate. A run that is missing, old, damaged, or of something else closes the gate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchaos.harness.record.rundir import RunDir

from .conftest import NOW, Release, change_json


def run_of(release: Release) -> RunDir:
    (found,) = release.runs.iterdir()
    return RunDir(found)


def in_result(**values: Any) -> Callable[[Release], None]:
    return lambda release: change_json(run_of(release).result, lambda result: result.update(values))


def in_environment(**values: Any) -> Callable[[Release], None]:
    return lambda release: change_json(run_of(release).artifacts / "environment.json", lambda one: one.update(values))


def of_gate(**values: Any) -> Callable[[Release], None]:
    return lambda release: release.gate.update(values)


def cut_result(release: Release) -> None:
    path = run_of(release).result
    path.write_bytes(path.read_bytes()[:700])


def without(name: str) -> Callable[[Release], None]:
    def remove(release: Release) -> None:
        path = run_of(release).root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def edit_scenario(release: Release) -> None:
    path = release.home / "scenarios" / "kill.yaml"
    path.write_text(path.read_text() + "# looser now\n")


def drop_case(release: Release) -> None:
    def drop(result: dict[str, Any]) -> None:
        result["cases"] = [case for case in result["cases"] if case["name"] != "loss_continuity"]

    change_json(run_of(release).result, drop)


def drop_from_plan(release: Release) -> None:
    def drop(plan: dict[str, Any]) -> None:
        plan["asserts"] = [one for one in plan["asserts"] if one["name"] != "loss_continuity"]

    change_json(run_of(release).plan, drop)


def damage_journal(release: Release) -> None:
    path = next(run_of(release).events.glob("rank0-*.jsonl"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")


def swap_for_link(release: Release) -> None:
    path = run_of(release).plan
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


CLOSING: dict[str, tuple[Callable[[Release], None], int, str]] = {
    "no runs at all": (lambda release: shutil.rmtree(release.runs), 1, "there is no run of it"),
    "stale": (in_result(started=(NOW - timedelta(hours=25)).isoformat()), 1, "is stale: it began 25.0 hours ago"),
    "stale in this gate": (of_gate(max_age="30m"), 1, "and 30.0 min are allowed"),
    "of the future": (in_result(started=(NOW + timedelta(hours=3)).isoformat()), 1, "it begins 3.0 hours from now"),
    "of no time": (in_result(started=""), 1, "its start time is not known"),
    "of a local time": (in_result(started="2026-11-22T11:00:00"), 1, "its start time is not known"),
    "with another text": (edit_scenario, 1, "none was made from this text of kill.yaml"),
    "no scenario beside it": (without("scenario.yaml"), 1, "none was made from this text of kill.yaml"),
    "not finished": (without("result.json"), 1, "no run of it counts: the newest is stale"),  # by its journal
    "cut": (cut_result, 1, "no run of it counts: the newest is stale"),
    "no record": (without("plan.json"), 1, "it can't be judged again"),
    "no journal": (without("events"), 2, "the run's journal is gone"),
    "damaged journal": (damage_journal, 2, "the journal is damaged"),
    "a link in it": (swap_for_link, 1, "it is a link"),
    "says nothing of an assertion": (drop_case, 1, "loss_continuity: the run's result has no such case"),
    "a plan that lacks an assertion": (drop_from_plan, 1, "loss_continuity: the run's result has no such case"),
    "left something behind": (in_result(exit_code=4), 4, "(exit code 4)"),
    "an internal error": (in_result(exit_code=5, verdict="error", reason="a bug"), 5, "run: a bug (exit code 5)"),
    "inconclusive as a whole": (in_result(exit_code=2, verdict="inconclusive", reason="ended"), 2, "run: ended"),
    "with other options": (
        in_result(reproduce="torchaos run kill.yaml --seed 0 --set job.timeout=9h"), 1, "other options than the gate's",
    ),
    "attached": (in_result(reproduce="torchaos run kill.yaml --seed 0 --attach 17"), 1, "(--attach)"),
    "without the gate's options": (
        of_gate(environments={"ci": {"set": ["job.timeout=9m"]}}), 1, "options than the gate's `set` (nothing)",
    ),
    "run nobody knows how": (in_result(reproduce=""), 1, "its command line is not known"),
    "other versions": (
        of_gate(environments={"ci": {"versions": {"torch": "2.12.*"}}}), 1, "with torch 2.13.0+cpu, not 2.12.*",
    ),
}  # fmt: skip


def test_a_run_that_passed_an_hour_ago_opens_it(release: Release) -> None:
    """The release that the tests below change, one thing each."""
    judged = release.judged()
    assert judged.exit_code == 0
    assert judged.results[0].reason == "every assertion holds"


@pytest.mark.parametrize("name", CLOSING)
def test_what_closes_a_gate(release: Release, name: str) -> None:
    """A gate that is open else is closed by each of these, with its exit code and a reason that says why."""
    change, code, said = CLOSING[name]
    change(release)
    judged = release.judged()
    (result,) = judged.results
    assert (judged.exit_code, said in result.reason) == (code, True), result.reason
    assert result.cases[0].reason


@pytest.mark.parametrize("change", [without("result.json"), cut_result], ids=["gone", "cut"])
def test_a_run_without_a_result_is_red_even_when_its_record_passes(
    release: Release, change: Callable[[Release], None]
) -> None:
    """Its journal says when it began and that all went well; but nobody has said so in the end."""
    release.gate["max_age"] = "3650d"
    change(release)
    judged = release.judged()
    assert judged.exit_code == 1
    assert "result" in judged.results[0].reason


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("forgets-optimizer", 1, "checkpoint_integrity"),
        ("freeze", 1, "completed"),
        ("stale-store", 1, "faults"),
        ("missed", 2, "faults"),
        ("no-such-script", 2, "faults"),
        ("interrupted", 2, "ended early"),
        ("kill-twice", 0, "every assertion holds"),
    ],
)
def test_recorded_runs(tmp_path: Path, name: str, code: int, said: str) -> None:
    """Real runs of every verdict: a gate closes for the reason that the run has."""
    release = Release(tmp_path / "release")
    release.scenario(name)
    release.run(name)
    judged = release.judged()
    assert judged.exit_code == code
    assert said in judged.results[0].reason


def test_the_commit_is_asked_of_the_job(release: Release) -> None:
    """A run of that commit counts, also by the beginning of its name; another, one with uncommitted changes, and one
    of no commit do not."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert "its commit is not known" in release.judged(commit=commit).results[0].reason
    for at, code in ((commit, 0), (commit + "-dirty", 1), (commit.replace("0", "9"), 1)):
        in_environment(commit=at)(release)
        assert release.judged(commit=commit[:12]).exit_code == code, at
    assert "was made at commit" in release.judged(commit=commit).results[0].reason


def test_options_and_versions_that_the_gate_names(release: Release) -> None:
    """A run with just the gate's `set`, in any order, and with versions that its patterns match, counts."""
    in_result(reproduce="torchaos run kill.yaml --set job.timeout=9m --seed 0 --set launcher=local")(release)
    setting = {"set": ["launcher=local", "job.timeout=9m"], "versions": {"torch": "2.13.*", "python": "3.1?.*"}}
    release.gate["environments"] = {"ci": setting}
    assert release.judged().exit_code == 0


def test_the_newest_run_of_each_seed_counts(release: Release) -> None:
    """A failure is superseded by a later run of the same seed, and not by one of another seed; what no longer counts,
    because it is too old or of an earlier text, does not close the gate."""
    release.run("kill", hours=2, of="forgets-optimizer")
    release.run("kill", hours=48, seed=3, of="forgets-optimizer")
    assert release.judged().exit_code == 0
    release.run("kill", hours=3, seed=4, of="forgets-optimizer")
    assert release.judged().exit_code == 1
    release.run("kill", hours=0.5, seed=4)
    assert release.judged().exit_code == 0
    release.run("kill", hours=0.1, of="forgets-optimizer")
    assert release.judged().exit_code == 1


def test_artifacts_may_lie_deep_and_twins_are_no_runs(tmp_path: Path) -> None:
    """As CI puts them: a folder per job, and the run directories below. What lies inside of one is not looked for."""
    release = Release(tmp_path / "release")
    for name in ("kill", "kill-twice"):
        release.scenario(name)
        release.run(name, at=f"runs-of-{name}/torchaos-runs")
    judged = release.judged()
    assert judged.exit_code == 0
    assert [result.scenario for result in judged.results] == ["kill-twice", "kill"]


def _explored(release: Release, **values: Any) -> Path:
    """An exploration of the scenario, whose result is that of the run with these values."""
    run, home = run_of(release), release.home / "explored"
    shutil.copytree(run.root, home / "recorded")
    (home / "recording").mkdir()
    for path in (run.plan, run.scenario):
        shutil.copy(path, home)
    result = {**json.loads(run.result.read_text()), "reproduce": "torchaos explore kill.yaml", **values}
    (home / "explored.json").write_text(json.dumps({"schema": 1, "result": result}))
    return Path(shutil.move(home, release.runs / "explored"))


def test_a_run_and_an_exploration_do_not_stand_for_each_other(release: Release) -> None:
    """A gate that asks for both needs both. The run that an exploration recorded does not count."""
    run = run_of(release).root
    _explored(release)
    assert [result.scenario for result in release.judged().results] == ["kill"]
    release.gate["explored"] = ["scenarios/kill.yaml"]
    judged = release.judged()
    assert (judged.exit_code, [result.scenario for result in judged.results]) == (0, ["kill", "kill (explored)"])
    shutil.rmtree(run)
    judged = release.judged()
    assert (judged.exit_code, [one.explored for one in judged.missing]) == (1, [False])


@pytest.mark.parametrize(("values", "said"), [
    ({}, "torchaos explore"),
    ({"verdict": "failed", "exit_code": 1, "reason": "won't start: 3 states", "cases": [{
        "name": "won't start", "kind": "assertion", "verdict": "failed", "reason": "3 states", "measured": {},
        "bound": {}, "seconds": []}]}, "won't start: 3 states"),
    ({"started": "2026-11-01T12:00:00+00:00"}, "is stale"),
    ({"reproduce": "torchaos explore kill.yaml --set job.timeout=9m"}, "other options"),
    ({"cases": 3}, "can't be read"),
])  # fmt: skip
def test_what_an_exploration_closes(release: Release, values: dict[str, Any], said: str) -> None:
    """It must be there, have passed, be recent, and be of the gate's own options."""
    release.gate["explored"] = ["scenarios"]
    if values:
        _explored(release, **values)
    judged = release.judged()
    assert judged.exit_code == 1 or judged.exit_code == 5
    assert said in judged.results[1].reason


def test_a_run_of_another_scenario_is_no_substitute(release: Release) -> None:
    """Each scenario needs a run of its own."""
    release.scenario("kill-twice")
    judged = release.judged()
    assert judged.exit_code == 1
    assert [one.name for one in judged.missing] == ["kill-twice"]


def test_repetitions_are_judged_together(tmp_path: Path) -> None:
    """A scenario that must pass twice in three: too few repetitions close the gate, one failure of three does not, and
    two do; more repetitions than were asked for allow no more failures, and one that can't be read is no failure that
    is allowed."""
    release = Release(tmp_path / "release")
    release.scenario("kill", repeat={"times": 3, "at_least": 2})
    release.run("kill", seed=0)
    torn = release.run("kill", seed=1)
    judged = release.judged()
    assert judged.exit_code == 1
    assert "only 2 of its 3 repetitions" in judged.results[-1].reason
    release.run("kill", seed=2, of="forgets-optimizer")
    assert release.judged().exit_code == 0
    release.run("kill", seed=3, of="forgets-optimizer")
    assert release.judged().exit_code == 1
    release.run("kill", seed=3, hours=0.5)
    assert release.judged().exit_code == 0
    torn.result.write_text(torn.result.read_text().replace('"schema": 1', '"schema": 99'))
    release.gate["max_age"] = "3650d"  # for the journal, which then says when it began
    judged = release.judged()
    assert judged.exit_code == 1
    assert any("use a newer torchaos" in one.reason for one in judged.results)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_result_that_was_cut_anywhere_never_opens_it(release: Release, share: float) -> None:
    """However little of it is missing."""
    path = run_of(release).result
    whole = path.read_text().rstrip()
    try:
        path.write_text(whole[: int(share * len(whole))])
        assert release.judged().exit_code != 0
    finally:
        path.write_text(whole)


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), junk=JUNK)
def test_a_result_with_any_value_replaced_is_judged_without_an_error(
    release: Release, data: st.DataObject, junk: Any
) -> None:
    """Whatever stands where: there is a verdict with a reason; and where it no longer says *passed*, it is closed."""
    path = run_of(release).result
    whole = path.read_text()
    raw = json.loads(whole)
    at: Any = raw
    key = data.draw(st.sampled_from(sorted(raw)))
    while isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
        at = at[key]
        key = data.draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else data.draw(st.integers(0, len(at) - 1))
    at[key] = junk
    try:
        path.write_text(json.dumps(raw))
        judged = release.judged()
        assert judged.results[0].reason
        if raw.get("verdict") != "passed" or raw.get("exit_code") not in (0, False):
            assert judged.exit_code != 0
    finally:
        path.write_text(whole)
