"""The grammar of a game day. It shares the job, the targets and the limits with scenarios."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.scenario.grammar import Items, Limits, Target
from torchaos.harness.scenario.job import Job
from torchaos.harness.scenario.strict import NAME, Count, Index, Strict

Length = Annotated[Seconds, Field(gt=0)]


class Risk(Strict):
    """A fault that may happen, and how often beside the others."""

    inject: Annotated[str, Field(description="The injector's name; `torchaos list` shows all.")]
    weight: Annotated[float, Field(gt=0, strict=False, description="How often, beside the others.")] = 1.0
    cause: Annotated[str, Field(description="What it stands for, as the report says it.")] = ""
    target: Annotated[
        Target | None, BeforeValidator(lambda value: {"all": True} if value == "all" else value),
        Field(description="Whom it hits; `any` is drawn anew each time."),
    ] = None  # fmt: skip
    with_: Annotated[dict[str, Any], Field(alias="with", description="The injector's parameters.")] = Field(
        default_factory=dict
    )
    for_: Annotated[Seconds | None, Field(alias="for", description="Taken back after this long.")] = None


class Preset(Strict):
    """A published table of causes; see `torchaos gameday --presets`."""

    name: Annotated[str, Field(description="Of the table.")]
    by: Annotated[Literal["count", "gpu_time"], Field(description="How the causes are weighed.")] = "count"


class Arrivals(Strict):
    """When faults come, on the clock of the game day. Exactly one of these."""

    mtbf: Annotated[Length | None, Field(description="Poisson: so long on the average from one to the next.")] = None
    every: Annotated[Length | None, Field(description="One each time that so much has gone by.")] = None
    trace: Annotated[list[Length] | None, Field(min_length=1, description="At these times.")] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Arrivals:
        if len(self.model_fields_set) != 1:
            raise ValueError("arrivals are drawn from one of mtbf, every and trace; write exactly one")
        if self.trace and sorted(self.trace) != self.trace:
            raise ValueError("the times of a trace are in order; sort them")
        return self


class RoundSize(Strict):
    """How much of the game day is one run. The job is started again for each, which costs its start-up."""

    faults: Annotated[Count, Field(description="So many faults at most.")] = 8
    length: Annotated[Length, Field(description="And no fault later than this after its start.")] = 1800.0


class Bounds(Strict):
    """What the score has to be. Shares lie between 0 and 1."""

    ettr: Annotated[float | None, Field(ge=0, le=1, strict=False, description="At least.")] = None
    goodput: Annotated[float | None, Field(ge=0, le=1, strict=False, description="At least.")] = None
    mttr: Annotated[Length | None, Field(description="The mean time to catch up, at most.")] = None
    mttr_p90: Annotated[Length | None, Field(description="Nine of ten recoveries are this quick.")] = None
    lost_steps: Annotated[Index | None, Field(description="That one recovery does again, at most.")] = None
    checkpoint_share: Annotated[float | None, Field(ge=0, le=1, strict=False, description="At most.")] = None
    stuck: Annotated[Index, Field(description="So many faults that were never recovered from, at most.")] = 0
    damaged: Annotated[Index, Field(description="So many rounds in which an assertion failed, at most.")] = 0
    lost_work: Annotated[Index | None, Field(description="So many recoveries from an older checkpoint.")] = None
    unproved: Annotated[
        float, Field(ge=0, le=1, strict=False, description="The share of faults that may miss, or not be felt.")
    ] = 0.1


class GameDay(Strict):
    """A job, and what may happen to it over a long time."""

    gameday: Annotated[str, Field(pattern=NAME, description="Its name.")]
    description: Annotated[str, Field(description="For the report.")] = ""
    seed: Annotated[Index, Field(description="Decides everything that is drawn.")] = 0
    job: Annotated[Job, Field(description="The job that the faults hit; {day} is a folder that its rounds share.")]
    duration: Annotated[Length, Field(description="How long faults come.")]
    arrivals: Annotated[Arrivals, Field(description="When they come.")]
    preset: Annotated[Preset | None, Field(description="Causes and weights of a published table.")] = None
    faults: Annotated[list[Risk], Field(description="What may happen, and how often.")] = Field(default_factory=list)
    rest: Annotated[Seconds, Field(description="So long after a recovery no fault comes.")] = 10.0
    gate: Annotated[
        Literal["recovered", "none"],
        Field(description="Whether the next fault waits until the one before was recovered from."),
    ] = "recovered"
    patience: Annotated[Length, Field(description="A job that makes no step for so long is stuck.")] = 300.0
    give_up: Annotated[Count, Field(description="So many rounds in a row that got stuck end the game day.")] = 3
    round: Annotated[RoundSize, Field(description="How much of it is one run.")] = Field(default_factory=RoundSize)
    score: Annotated[Bounds, Field(description="What the score has to be.")] = Field(default_factory=Bounds)
    assert_: Annotated[Items, Field(alias="assert", description="What must hold in every round.")] = Field(
        default_factory=list
    )
    steady_state: Annotated[Items, Field(description="What must hold before a round's first fault.")] = Field(
        default_factory=list
    )
    stop: Annotated[Items, Field(description="What ends a round early.")] = Field(default_factory=list)
    limits: Annotated[Limits, Field(description="Blast radius, of each round.")] = Field(default_factory=Limits)
    consent: Annotated[list[str], Field(description="What may hurt the host; the command line must say it too.")] = (
        Field(default_factory=list)
    )
    launcher: Annotated[str, Field(description="What starts the job's nodes, see `torchaos list`.")] = "local"
    tags: Annotated[list[str], Field(description="Words of yours, for what reads the file.")] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _something(self) -> GameDay:
        if not self.faults and self.preset is None:
            raise ValueError("nothing may happen; write faults, or a preset")
        return self
