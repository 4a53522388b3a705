"""Every ready scenario passes with its own job, and fails with a defective one. This is a sample;
lab/campaigns/teeth.py runs all."""

from __future__ import annotations

import ast
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import teeth
import toxiproxied
import yaml

from torchaos.harness import registry

TABLE = teeth.table()
DEFECTS = {
    node.name: ast.get_docstring(node) or ""
    for node in ast.parse(teeth.DEFECTIVE.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name not in ("main", "watch") and node.name[0] != "_"
}
SCENARIOS = {
    name: yaml.load((teeth.SCENARIOS / f"{name}.yaml").read_text(), yaml.CSafeLoader) for name in teeth.names()
}


def test_each_ready_scenario_has_something_that_it_must_fail() -> None:
    """The table names each scenario, an assertion that the scenario makes or that every run makes, and a defect that
    exists."""
    assert sorted(TABLE) == teeth.names()
    for name, own in TABLE.items():
        assert own, name
        for tooth in own:
            assert tooth.defect or tooth.set, name
            assert not tooth.defect or tooth.defect in DEFECTS, (name, tooth.defect)
            assert tooth.fails in _asserted(name) | {"split_brain"}, (name, tooth.fails)


def test_each_ready_scenario_fails_for_its_own_fault() -> None:
    """A job that another or a stronger fault ends says nothing about this one. NCCL's cards are slow from the start, so
    that no job can notice that they became slow."""
    changed = {name for name, own in TABLE.items() if not any(tooth.of_its_own_fault for tooth in own)}
    assert changed == {"collective/nccl-nics"}


def test_each_defect_says_what_is_wrong_and_is_used() -> None:
    """A defect without a scenario that must find it shows nothing."""
    used = {tooth.defect for own in TABLE.values() for tooth in own}
    assert sorted(DEFECTS) == sorted(used - {""})
    assert all(len(words) > 20 for words in DEFECTS.values())


def test_the_page_names_the_teeth_that_were_used() -> None:
    """A result is no evidence for a tooth with another fault: each row names all that was changed, and a row of a tooth
    that has changed since is stale."""
    changed = teeth.Tooth("a/b", "restarts", "is_impatient", {"job.world_size": 2, "faults.0.with": {"percent": 60}})
    assert changed.name == 'is_impatient faults.0.with={"percent": 60}'
    page = (teeth.REPOSITORY / "lab" / "results" / "teeth.md").read_text()
    scenario, seen = "", 0
    for line in page.partition("|---|")[2].splitlines()[1:]:
        first, _as_it_is, tooth, *_rest = (
            (cell.strip() for cell in line.strip("|").split("|")) if "|" in line else ("",) * 3
        )
        scenario = first.strip("`") or scenario
        seen += bool(tooth)
        assert not tooth or tooth in {own.name for own in TABLE[scenario]}, (scenario, tooth)
    assert seen > 100


def test_what_has_its_right_result_on_the_page_is_not_run_again() -> None:
    """A long campaign goes on where it ended: only what is new, changed or was not right is due."""
    program = runpy.run_path(str(teeth.REPOSITORY / "lab" / "campaigns" / "teeth.py"))
    known = program["on_page"](teeth.REPOSITORY / "lab" / "results" / "teeth.md")
    due = {(name, tooth.name if tooth else "") for name, tooth, _seed in program["due"](teeth.names(), None, known)}
    right = {(bite.scenario, bite.tooth) for bite in known if bite.right}
    every = {(name, "") for name in TABLE} | {(name, tooth.name) for name, own in TABLE.items() for tooth in own}
    assert len(right) > 100
    assert due == every - right


def test_a_seed_reaches_the_job_of_each_scenario() -> None:
    """Runs over seeds differ in their weights, data and dropout, with a defect too."""
    for name, scenario in SCENARIOS.items():
        changed = yaml.load(teeth.with_seed((teeth.SCENARIOS / f"{name}.yaml").read_text(), 7), yaml.CSafeLoader)
        words = {"before": _words(scenario), "after": _words(changed)}
        places = [place for place, word in enumerate(words["after"]) if word == "--seed"]
        assert places, name
        assert all(words["after"][place - 1].startswith("{jobs}/gpt_") for place in places), name
        assert [word for word in words["after"] if word not in ("--seed", "7")] == words["before"], name


def _words(scenario: dict[str, Any]) -> list[str]:
    command = scenario["job"]["command"]
    return command if isinstance(command, list) else shlex.split(command)


def test_a_defect_over_seeds_has_the_twins_that_its_assertion_needs() -> None:
    """One, or none where a run is compared with itself alone; what a scenario says of its twins stands."""
    twins = {(name, tooth.fails): tooth.twins for name, own in TABLE.items() for tooth in own}
    assert twins["process/kill-rank", "loss_continuity"] == "twin={runs: 1}"
    assert twins["process/kill-rank", "no_lost_work"] == "twin=none"
    assert twins["node/minority-goes-on", "split_brain"] == ""


def test_runs_over_seeds_are_counted_by_seed(tmp_path: Path) -> None:
    """A right run is due no more with its own seed only, and the page tells which seed was wrong."""
    program = runpy.run_path(str(teeth.REPOSITORY / "lab" / "campaigns" / "teeth.py"))
    own = [tooth.name for tooth in TABLE["process/kill-agent"]]
    done = [
        teeth.Bite("process/kill-agent", "", "", "passed", "", seed=1, day="2026-01-02"),
        teeth.Bite("process/kill-agent", "", "", "inconclusive", "", seed=2, day="2026-01-02"),
        teeth.Bite(
            "process/kill-agent", own[0], "no_lost_work", "failed", "", {"no_lost_work": "failed"}, seed=2,
            day="2026-01-02",
        ),
    ]  # fmt: skip
    (tmp_path / "results.jsonl").write_text("".join(bite.to_json() + "\n" for bite in done))
    assert program["read"](tmp_path / "results.jsonl") == done
    due = program["due"](["process/kill-agent"], None, done, [1, 2])
    assert [(tooth.name if tooth else "", seed) for _name, tooth, seed in due] == [
        (own[0], 1), (own[1], 1), ("", 2), (own[1], 2),
    ]  # fmt: skip
    table = program["over_seeds"](done)
    assert table.splitlines()[2:] == [
        "| `process/kill-agent` | as it is | 1 of 2 | 1 | 2: inconclusive | 2026-01-02 |",
        f"| `process/kill-agent` | {own[0]} | 1 of 1 | 2 |  | 2026-01-02 |",
    ]
    page = tmp_path / "page.md"
    page.write_text(f"<!-- teeth-seeds: begin -->\n{table}\n<!-- teeth-seeds: end -->\n")
    assert program["on_page_of_seeds"](page) == done


def test_a_defect_finds_its_job_in_each_scenario() -> None:
    """The command of a scenario with a defect is still the same job, with defective.py before it."""
    for name, own in TABLE.items():
        text = (teeth.SCENARIOS / f"{name}.yaml").read_text()
        for tooth in (one for one in own if one.defect):
            changed = yaml.load(teeth.with_defect(text, tooth.defect), yaml.CSafeLoader)
            command = changed["job"]["command"]
            words = command if isinstance(command, list) else shlex.split(command)
            place = words.index(str(teeth.DEFECTIVE))
            assert words[place + 1] == tooth.defect, name
            assert words[place + 2].startswith("{jobs}/"), name


# Faults of pods and of a scheduler need a cluster of the reader's: docs/kubernetes.md and docs/slurm.md; tests/clusters
# runs them.
ON_A_CLUSTER = {name for name in registry.names("injectors") if name.startswith(("pod.", "scheduler.", "node.cordon"))}


@pytest.mark.parametrize("group", ["injectors", "assertions"])
def test_everything_we_bring_is_in_a_ready_scenario(group: str) -> None:
    """There is no injector and no assertion of ours that a reader can't see at work."""
    if group == "injectors":
        used = ON_A_CLUSTER | {fault["inject"] for one in SCENARIOS.values() for fault in one["faults"]}
    else:
        used = {name for scenario in SCENARIOS for name in _asserted(scenario)}
    ours = {name for name in registry.names(group) if registry.find(group, name).__module__.startswith("torchaos.")}
    assert not ours - used


def _asserted(name: str) -> set[str]:
    return {one if isinstance(one, str) else next(iter(one)) for one in SCENARIOS[name]["assert"]}


needs = pytest.mark.needs
HERE = {
    "network/delay": [needs("links", "shaper")],
    "node/freeze": [needs("links")],
    "proxy/rendezvous-latency": [pytest.mark.smoke],
    "replicas/kill-one": [pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")],
    "node/slow": [pytest.mark.smoke],
    "resume/epoch-end": [],
    "saves/nan-gradient": [],
    "storage/disk-full": [needs("fuse")],
    "tiers/disk-lost": [needs("links")],
}
# Run without a twin, which would show no more of these: a rendezvous changes no loss, steps that are done again are
# compared with their first time, and some assertions need none.
_GOES_ON = ["assert=[recovery_time, checkpoint_integrity, {restarts: {max: 0}}, {completed: {steps: 40}}]"]
ALONE = {
    "network/delay": _GOES_ON,
    "node/freeze": _GOES_ON,
    "node/slow": _GOES_ON,
    "resume/epoch-end": [
        "assert=[recovery_time, checkpoint_integrity, loss_continuity, sample_accounting, state_restored, "
        "no_lost_work, {completed: {steps: 44}}]"
    ],
    "storage/disk-full": [
        "assert=[recovery_time, checkpoint_integrity, {completed: {steps: 60}}]",
        "faults.0.when={step: 30, phase: backward}",  # a busy machine takes longer than the fault for two steps
    ],
    "proxy/rendezvous-latency": [
        "assert=[recovery_time, checkpoint_integrity, loss_continuity, sample_accounting, no_lost_work, "
        "{restarts: {max: 2}}, {completed: {steps: 40}}]"
    ],
    "saves/nan-gradient": ["assert=[{no_lost_work: {steps: 0}}, {restarts: {max: 1}}]"],
    "tiers/disk-lost": ["assert=[{no_lost_work: {steps: 5}}, {completed: {steps: 40}}]"],
}
# Those of which tests/e2e runs a scenario each time, or its faults (test_main_job.py).
IN_E2E = {"checkpoint", "collective", "container", "gpu", "numeric", "process", "resume"}


def test_each_family_has_a_scenario_that_ci_runs() -> None:
    """A new family gets one, here or there."""
    assert {name.partition("/")[0] for name in HERE} | IN_E2E == {name.partition("/")[0] for name in TABLE}


@pytest.mark.job
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in HERE.items()])
def test_a_ready_scenario_of_each_family_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that a scenario comes with passes it; other families have such a test in tests/e2e."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if name.startswith("proxy/"):
        monkeypatch.setenv("PATH", toxiproxied.server_on_path(tmp_path)["PATH"])
    bite = teeth.bite(name, None, tmp_path, ["twin=none", *ALONE[name]] if name in ALONE else [])
    if bite.verdict == "refused":
        pytest.skip(bite.reason)
    assert bite.right, bite


@pytest.mark.job
@pytest.mark.long
def test_a_job_that_ignores_its_notice_is_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spot preemption is about a checkpoint in time, and not only about a job that comes back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tooth,) = TABLE["process/spot-preemption"]
    bite = teeth.bite(tooth.scenario, tooth, tmp_path)
    assert bite.right, bite
