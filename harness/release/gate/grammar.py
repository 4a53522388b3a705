"""The grammar of a release gate: the scenarios, the largest age of their runs, the bounds in each environment, and the
waivers."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.scenario.grammar import Items
from torchaos.harness.scenario.strict import NAME, Strict

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=NAME)]


def _day(value: object) -> date:
    try:
        return date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a date; write it as 2026-12-31") from None


class Waiver(Strict):
    """One assertion of one scenario that may fail until a day. An incomplete rollback and an error are never waived."""

    scenario: Text
    assertion: Annotated[str, Field(description="The assertion's name. `faults`: the job does not outlive its faults.")]
    reason: Annotated[Text, Field(description="Why the failure is accepted.")]
    ticket: Annotated[Text, Field(description="The ticket of the repair.")]
    expires: Annotated[date, BeforeValidator(_day), Field(description="The last day of the waiver (UTC).")]
    environments: Annotated[
        list[Name] | None, Field(min_length=1, description="The waiver is valid only in these environments.")
    ] = None
    covers: Annotated[
        list[Literal["failed", "inconclusive"]],
        Field(min_length=1, description="The verdicts that the waiver accepts."),
    ] = Field(default_factory=lambda: ["failed"])  # type: ignore[arg-type]


class Environment(Strict):
    bounds: Annotated[
        dict[str, Items],
        Field(description="By scenario, or by a pattern such as kill-*; written as under `assert`. The "
        "scenario's own bounds "
              "hold as well."),
    ] = Field(default_factory=dict)  # fmt: skip
    set: Annotated[
        list[str], Field(description="KEY=VALUE: how scenarios are run here, in the same words as for `run --set`.")
    ] = Field(default_factory=list)
    versions: Annotated[
        dict[Literal["torchaos", "torch", "python"], Text],
        Field(description="The versions that a run must have, as patterns such as 2.13.*."),
    ] = Field(default_factory=dict)
    max_age: Annotated[Seconds | None, Field(gt=0, description="Replaces the gate's max_age.")] = None


class Gate(Strict):
    """The runs that are required before a release."""

    gate: Annotated[Name, Field(description="Its name.")]
    description: str = ""
    scenarios: Annotated[
        list[Text],
        Field(min_length=1, description="Files, and folders of them, relative to this file; each must pass."),
    ]
    explored: Annotated[
        list[Text],
        Field(description="Files, and folders of them; each must be explored, by `torchaos explore`, and pass."),
    ] = Field(default_factory=list)
    max_age: Annotated[Seconds, Field(gt=0, description="A run that began longer ago does not count.")]
    environments: Annotated[dict[Name, Environment], Field(min_length=1)]
    waivers: list[Waiver] = Field(default_factory=list)

    def max_age_s(self, environment: str) -> float:
        own = self.environments[environment].max_age
        return self.max_age if own is None else own

    def waivers_in(self, environment: str) -> list[Waiver]:
        return [waiver for waiver in self.waivers if waiver.environments is None or environment in waiver.environments]
