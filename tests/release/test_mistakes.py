"""A gate's file with mistakes is refused before anything is judged, with the place of each mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.release.gate_file import load

from .conftest import Release

BOUND = {"recovery_time": {"catch_up": "60s"}}


def ci(**values: object) -> Callable[[Release], None]:
    return lambda release: release.gate.update(environments={"ci": values})


def of(**values: object) -> Callable[[Release], None]:
    return lambda release: release.gate.update(values)


def waived(**values: object) -> Callable[[Release], None]:
    def change(release: Release) -> None:
        release.waive("kill", "restarts")
        release.gate["waivers"][0].update(values)

    return change


def without_ticket(release: Release) -> None:
    waived()(release)
    del release.gate["waivers"][0]["ticket"]


def twice(release: Release) -> None:
    release.waive("kill", "restarts")
    release.waive("kill", "restarts", expires="2027-01-01")


def same_name(release: Release) -> None:
    path = release.home / "scenarios" / "kill.yaml"
    path.with_name("other.yaml").write_text(path.read_text())


MISTAKES: dict[str, tuple[Callable[[Release], None], str]] = {
    "an unknown key": (of(waiver=[]), "gate.yaml:8:1: unknown key 'waiver'; did you mean 'waivers'?"),
    "no age": (of(max_age=None), "gate.yaml:4:10: "),
    "an age without a unit": (of(max_age=5), "gate.yaml:4:10: 5 is not a duration"),
    "no scenarios": (of(scenarios=[]), "gate.yaml:2:12: scenarios is empty; write at least one"),
    "no such folder": (of(scenarios=["scenario"]), "gate.yaml:3:3: scenario: there is no such file or folder"),
    "a folder of the gate alone": (of(scenarios=["."]), "gate.yaml:3:3: .: there is no *.yaml in it"),
    "no environment": (of(environments={}), "gate.yaml:5:15: environments is empty; write at least one"),
    "an unknown scenario": (
        ci(bounds={"kil": [BOUND]}), "gate.yaml:8:7: no scenario is called 'kil'; did you mean 'kill'?",
    ),
    "a pattern of nothing": (ci(bounds={"x-*": [BOUND]}), "no scenario is called 'x-*'; there are kill"),
    "an unknown assertion": (
        ci(bounds={"*": [{"recovery_tim": {"catch_up": "1s"}}]}), "recovery_tim is asserted by none of these scenarios"
        "; did you mean 'recovery_time'?",
    ),
    "one that is not asserted": (ci(bounds={"*": [{"clean_exit": {}}]}), "clean_exit is asserted by none"),
    "no bound": (ci(bounds={"*": ["recovery_time"]}), "recovery_time has no bound here"),
    "an unknown bound": (
        ci(bounds={"*": [{"recovery_time": {"catch": "60s"}}]}), "recovery_time has no parameter 'catch'; did you",
    ),
    "a bound of another type": (ci(bounds={"*": [{"recovery_time": {"catch_up": 60}}]}), "60 is not a duration"),
    "a wrong option": (ci(set=["job.timeou=9m"]), "--set job.timeou: unknown key 'timeou'; did you mean 'timeout'?"),
    "an unknown version": (ci(versions={"numpy": "2.*"}), "numpy is 'torchaos', 'torch' or 'python', not 'numpy'"),
    "a waiver of nothing": (waived(scenario="kil"), "gate.yaml:8:13: the gate has no scenario 'kil'; did you"),
    "of no assertion": (waived(assertion="restart"), "gate.yaml:9:14: kill has no assertion 'restart'; did you mean"),
    "of the rollback": (waived(assertion="rollback"), "kill has no assertion 'rollback'"),
    "without a ticket": (without_ticket, "the key 'ticket' is missing"),
    "without a reason": (waived(reason=""), "reason: string should have at least 1 character"),
    "no date": (waived(expires="31.12.2026"), "gate.yaml:12:12: '31.12.2026' is not a date; write it as 2026-12-31"),
    "covers an error": (waived(covers=["error"]), "covers is 'failed' or 'inconclusive', not 'error'"),
    "of no environment": (waived(environments=["staging"]), "there is no environment 'staging'; there are ci"),
    "twice": (twice, "restarts of kill is waived already"),
    "two of one name": (same_name, "are both called kill; rename one of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(release: Release, name: str) -> None:
    """Each is told with what to do about it, and where that can be said, with its line and column."""
    change, said = MISTAKES[name]
    change(release)
    with pytest.raises(UsageError) as told:
        load(release.file)
    assert said in str(told.value)


def test_all_mistakes_are_told_at_once(release: Release) -> None:
    """A line each, in the order of the file."""
    ci(bounds={"x": [BOUND], "*": [{"completd": {"steps": 1}}]})(release)
    release.waive("kill", "restarts", environments=["nightly"])
    with pytest.raises(UsageError) as told:
        load(release.file)
    assert len(str(told.value).splitlines()) == 3


def test_a_wrong_scenario_is_told_with_its_own_place(release: Release) -> None:
    """What is wrong with a scenario of the gate is said as `torchaos validate` says it."""
    path = release.home / "scenarios" / "kill.yaml"
    path.write_text(path.read_text().replace("process.kill", "process.kil"))
    with pytest.raises(UsageError, match=r"scenarios/kill\.yaml:\d+:\d+: .*process\.kill"):
        load(release.file)
