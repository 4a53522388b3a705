"""Turns a round of a game day into an ordinary scenario, as a person would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchaos.harness.gameday.draw import Drawn, Round
from torchaos.harness.gameday.grammar import GameDay, Risk
from torchaos.harness.scenario.placeholders import fill_some

# The assertions of every round, unless the game day has its own: all assertions that need no twin.
USUAL = ("recovery_time", "loss_continuity", "sample_accounting", "checkpoint_integrity")


def scenario_of(day: GameDay, one: Round, here: Path, home: Path) -> dict[str, Any]:
    """The scenario of one round. `here`: the folder of the day's file; `home`: the folder `{day}`."""
    asserts: list[Any] = [{item.name: item.params} for item in day.assert_] or list(USUAL)
    quiet = {"wall": {"longer_than": _seconds(one.end_s - one.start_s)}}
    return {
        "scenario": f"{day.gameday}-round-{one.number:03d}",
        "description": f"Round {one.number} of the game day {day.gameday}.",
        "job": _job(day, one, here, home),
        "faults": [_fault(day, one, number) for number in range(len(one.faults))],
        "assert": asserts,
        "steady_state": _items(day.steady_state) or ["ranks_up", {"steps": {"at_least": 2}}],
        "stop": [*_items(day.stop), *_stuck(day)],
        "until": [quiet, {"recovered": {"rest": _seconds(day.rest)}}],
        "limits": _limits(day),
        "consent": list(day.consent),
        "twin": "none",
        "launcher": day.launcher,
        "tags": list(day.tags),
    }


def as_scenario(day: GameDay, here: Path, home: Path) -> dict[str, Any]:
    """One scenario with everything that any round may contain, in the order of the file. The scenario checks run on
    it."""
    every = [Drawn(f"risk-{number}", 0.0, risk) for number, risk in enumerate(day.faults)]
    return scenario_of(day, Round(0, 0.0, day.round.length, tuple(every)), here, home)


def _job(day: GameDay, one: Round, here: Path, home: Path) -> dict[str, Any]:
    values = {"day": str(home), "here": str(here)}
    job: dict[str, Any] = _filled(day.job.model_dump(exclude_none=True, exclude_defaults=True), values)
    job["cwd"] = str((here / fill_some(day.job.cwd, values)).absolute())
    if "resubmit" in job:
        job["resubmit"] = {**job["resubmit"], "delay": _seconds(day.job.resubmit.delay if day.job.resubmit else 0.0)}
    # A recovery may take any time up to the patience of the game day.
    lasting = sum((fault.risk.for_ or 0.0) + day.rest + day.patience for fault in one.faults)
    job["timeout"] = _seconds(max(day.job.timeout, one.end_s - one.start_s + lasting + day.patience))
    return job


def _limits(day: GameDay) -> dict[str, Any]:
    limits: dict[str, Any] = day.limits.model_dump(exclude_none=True, exclude_defaults=True)
    return limits | ({"duration": _seconds(day.limits.duration)} if day.limits.duration is not None else {})


def _fault(day: GameDay, one: Round, number: int) -> dict[str, Any]:
    fault, risk = one.faults[number], one.faults[number].risk
    when: dict[str, Any] = {"time": _seconds(fault.at_s - one.start_s)}
    if number and day.gate == "recovered":
        when |= {"after": one.faults[number - 1].id, "state": "recovered", "delay": _seconds(day.rest)}
    return {"inject": risk.inject, "id": fault.id, "when": when, **_rest_of(risk)}


def _rest_of(risk: Risk) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if risk.target is not None:
        found["target"] = risk.target.model_dump(exclude_none=True)
    if risk.with_:
        found["with"] = dict(risk.with_)
    if risk.for_ is not None:
        found["for"] = _seconds(risk.for_)
    return found


def _stuck(day: GameDay) -> list[Any]:
    own = {item.name for item in day.stop}
    return [] if "no_progress" in own else [{"no_progress": {"longer_than": _seconds(day.patience)}}]


def _items(items: Any) -> list[Any]:
    return [{item.name: item.params} for item in items]


def _filled(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, values) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, values) for one in value]
    return fill_some(value, values) if isinstance(value, str) else value


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"
