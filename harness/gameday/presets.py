"""Published tables of the causes of failures, and the injector that imitates each cause (presets.yaml has the
sources)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml
from pydantic import Field

from torchaos.harness import registry
from torchaos.harness.contracts import UsageError
from torchaos.harness.gameday.grammar import GameDay, Risk
from torchaos.harness.running import capabilities
from torchaos.harness.scenario.strict import Strict


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
    """The faults of a game day. `risks`: the faults that may be drawn. `without`: the causes that are left out, with
    their weight and the reason."""

    risks: tuple[Risk, ...]
    without: tuple[tuple[str, float, str], ...] = ()


@cache
def presets() -> Presets:
    text = (files("torchaos.harness.gameday") / "presets.yaml").read_text()
    return Presets.model_validate(yaml.safe_load(text))


def mix_of(day: GameDay) -> Mix:
    """The faults that may be drawn here. Raises UsageError if there is no such preset, or if none of its causes can be
    injected here."""
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
    """The first fault that can be applied here. If there is none: None, and the reason why the last fault can't be
    applied."""
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
