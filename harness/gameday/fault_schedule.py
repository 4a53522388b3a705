"""Loads the file of a game day, and draws the whole day from the seed before anything is done, at the published rates
of failures (presets.yaml). Then turns each round into an ordinary scenario. All mistakes in the file are reported at
once, each with its place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from torchaos.harness import registry
from torchaos.harness.gameday.day_grammar import Arrivals, GameDay, Risk
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import stream
from torchaos.harness.running import capabilities
from torchaos.harness.scenario.checks import Tell, check, with_settings
from torchaos.harness.scenario.field_types import Strict, fill_all, fill_some
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.loader import load_as


class Cause(Strict):
    """A cause in a published table. `count` and `gpu_time` are the table's own figures, in any unit, because only
    shares are used."""

    cause: str
    count: float | None = Field(default=None, strict=False)
    gpu_time: float | None = Field(default=None, strict=False)
    stands: str | None = None  # in `stand_ins`; None: no injector imitates this cause


class Table(Strict):
    source: str
    says: str = ""
    causes: list[Cause]


class Presets(Strict):
    stand_ins: dict[str, list[Risk]]
    tables: dict[str, Table]


@dataclass(frozen=True)
class Mix:
    """`risks`: the faults to draw from. `without`: (cause, weight, reason) for each cause of the preset's table that is
    left out."""

    risks: tuple[Risk, ...]
    without: tuple[tuple[str, float, str], ...] = ()


@cache
def presets() -> Presets:
    text = (files("torchaos.harness.gameday") / "presets.yaml").read_text()
    return Presets.model_validate(yaml.safe_load(text))


def mix_of(day: GameDay) -> Mix:
    """The faults that may be drawn here. Raises UsageError if the preset does not exist, or if none of its causes can
    be injected here."""
    if day.preset is None:
        return Mix(tuple(day.faults))
    known = presets()
    table = known.tables.get(day.preset.name)
    if table is None:
        near = registry.suggest(day.preset.name, known.tables)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known.tables)}"
        raise UsageError(f"there is no preset {day.preset.name!r}; {hint}")
    risks, without = list(day.faults), list[tuple[str, float, str]]()
    for cause in table.causes:
        weight = cause.count if day.preset.by == "count" else cause.gpu_time
        if weight is None:
            continue
        stand_in, why = _first_possible(known.stand_ins.get(cause.stands or "", []), day)
        if stand_in is None:
            without.append((cause.cause, weight, why))
        else:
            risks.append(stand_in.model_copy(update={"weight": weight, "cause": cause.cause}))
    if not any(cause.count if day.preset.by == "count" else cause.gpu_time for cause in table.causes):
        raise UsageError(
            f"the preset {day.preset.name} has no weights by {day.preset.by}; write the other value of `by`"
        )
    if not risks:
        raise UsageError(f"no cause of the preset {day.preset.name} can be injected here: {_reasons(without)}")
    return Mix(tuple(risks), tuple(without))


def _first_possible(stand_ins: Sequence[Risk], day: GameDay) -> tuple[Risk | None, str]:
    """The first fault that can be applied here, and an empty text. If there is none: None, and why the last fault can't
    be applied."""
    why = "no injector imitates it"
    for risk in stand_ins:
        why = _why_not(risk, day)
        if not why:
            return risk, ""
    return None, why


def _reasons(without: Sequence[tuple[str, float, str]]) -> str:
    return "; ".join(sorted({why for _, _, why in without}))


def _why_not(risk: Risk, day: GameDay) -> str:
    """Why a fault can't be applied to this job on this machine; empty if it can be applied."""
    injector = registry.find("injectors", risk.inject)
    launcher = registry.find("launchers", day.launcher)
    offered: frozenset[str] = launcher.needs
    if "links" in injector.needs and "links" not in offered:
        return f"{risk.inject} needs links between nodes, and the launcher {day.launcher} makes none"
    if injector.consent and injector.consent not in day.consent:
        return f"{risk.inject} needs the consent {injector.consent}"
    if injector.hits == "files" and day.job.checkpoints is None:
        return f"{risk.inject} hits checkpoints, and job.checkpoints does not name their folder"
    if injector.hits in ("agents", "nodes") and "links" not in offered and day.job.resubmit is None:
        return f"{risk.inject} ends torchrun, and nobody starts it again; write job.resubmit"
    for name in sorted(injector.needs - {"links"}):
        if not (found := capabilities.check(name)).present:
            return f"{risk.inject} needs {name} ({found.detail}), which is missing"
    return ""


SHORTEST_S = 60.0  # of a round without faults: the start of the job takes a part of it


@dataclass(frozen=True)
class Drawn:
    """One fault of the game day. `at_s`: its time in seconds since the day began."""

    id: str
    at_s: float
    risk: Risk


@dataclass(frozen=True)
class Round:
    """One round. `start_s`, `end_s`: its planned start and end in seconds since the game day began. Each fault comes
    `at_s` - `start_s` seconds after the round's launch."""

    number: int
    start_s: float
    end_s: float
    faults: tuple[Drawn, ...]


def draw(day: GameDay, risks: Sequence[Risk], seed: int) -> list[Drawn]:
    """Every fault of the day, in order of time. Each fault has its own random stream, so a longer day begins with the
    faults of a shorter day. Faults that could not end before the day ends are left out."""
    weights = list(accumulate(risk.weight for risk in risks))
    found = []
    for number, at_s in enumerate(arrivals(day.arrivals, day.duration, stream(seed, "arrivals"))):
        risk = stream(seed, f"fault {number}").choices(risks, cum_weights=weights)[0]
        if at_s + (risk.for_ or 0.0) + day.rest <= day.duration:
            found.append(Drawn(f"f{number:03d}-{risk.inject}", round(at_s, 3), risk))
    return found


def arrivals(when: Arrivals, duration_s: float, random_stream: random.Random) -> Iterator[float]:
    """The times at which faults come, in seconds since the game day began, up to its end."""
    if when.trace is not None:
        gaps: Iterator[float] = iter([b - a for a, b in zip([0.0, *when.trace], when.trace, strict=False)])
    elif when.every is not None:
        gaps = (when.every for _ in count())
    else:
        mean = when.mean_s or duration_s
        gaps = (random_stream.expovariate(1 / mean) for _ in count())
    for at_s in accumulate(gaps):
        if at_s > duration_s:
            return
        yield at_s


def cut(day: GameDay, faults: Sequence[Drawn]) -> list[Round]:
    """Divides the day into rounds without gaps. A round ends with the last fault that it may have, or at its full
    length. If less than SHORTEST_S without faults would remain at the end of the day, the last round takes that
    time."""
    found: list[Round] = []
    start_s, mine = 0.0, list[Drawn]()

    def end(end_s: float) -> None:
        nonlocal start_s, mine
        found.append(Round(len(found), start_s, end_s, tuple(mine)))
        start_s, mine = end_s, []

    for fault in faults:
        while fault.at_s - start_s > day.round.length:
            end(start_s + day.round.length)
        mine.append(fault)
        if len(mine) == day.round.faults:
            end(fault.at_s)
    while day.duration - start_s > day.round.length:
        end(start_s + day.round.length)
    if mine or not found or day.duration - start_s >= SHORTEST_S:
        end(day.duration)
    return [*found[:-1], replace(found[-1], end_s=day.duration)]


# The assertions of every round, unless the game day has its own: all assertions that need no twin.
USUAL = ("recovery_time", "loss_continuity", "sample_accounting", "checkpoint_integrity")


def scenario_of(day: GameDay, one: Round, here: Path, home: Path) -> dict[str, Any]:
    """The scenario of one round. `here`: the folder of the day's file. `home`: the folder that `{day}` stands for."""
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
    """One scenario with everything that any round may contain, in the order of the file, so that the checks of
    scenarios can run on it."""
    every = [Drawn(f"risk-{number}", 0.0, risk) for number, risk in enumerate(day.faults)]
    return scenario_of(day, Round(0, 0.0, day.round.length, tuple(every)), here, home)


def _job(day: GameDay, one: Round, here: Path, home: Path) -> dict[str, Any]:
    values = {"day": str(home), "here": str(here)}
    job: dict[str, Any] = fill_all(day.job.model_dump(exclude_none=True, exclude_defaults=True), values)
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


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"


_ANYWHERE = Path("/")  # any path: the checks read no folder


def _nothing(day: GameDay, tell: Tell) -> None: ...


def load(
    path: Path, overrides: Sequence[str] = (), also: Callable[[GameDay, Tell], None] = _nothing
) -> GameDay:  # fmt: skip
    """Loads the file of a game day. `also`: a function that reports further mistakes. Raises ScenarioError with a line
    per mistake: `file:line:column: what; what to do`."""

    def checked(day: GameDay, tell: Tell) -> None:
        also(day, tell)
        try:
            scenario = with_settings(Scenario).model_validate(as_scenario(day, _ANYWHERE, _ANYWHERE))
        except ValidationError as error:
            tell((), f"no scenario can be made of it: {error.errors()[0]['msg']}")
            return
        check(scenario, tell)

    return load_as(GameDay, path, overrides, checked)
