"""The grammar of a game day. It shares the job, the targets and the limits with scenarios."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from torchaos.harness.base_classes import Seconds
from torchaos.harness.scenario.field_types import NAME, Count, Index, Strict
from torchaos.harness.scenario.grammar import Items, Job, Limits, Target

Length = Annotated[Seconds, Field(gt=0)]


class Risk(Strict):
    """A fault that may be drawn, with its weight."""

    inject: Annotated[str, Field(description="The injector's name; `torchaos list injectors` shows all.")]
    weight: Annotated[float, Field(gt=0, strict=False, description="The weight of this fault among all faults.")] = 1.0
    cause: Annotated[str, Field(description="The cause of failures that it imitates, for the report.")] = ""
    target: Annotated[
        Target | None, BeforeValidator(lambda value: {"all": True} if value == "all" else value),
        Field(description="The target; for `any`, each fault gets a target drawn at random."),
    ] = None  # fmt: skip
    with_: Annotated[dict[str, Any], Field(alias="with", description="The injector's parameters.")] = Field(
        default_factory=dict
    )
    for_: Annotated[Seconds | None, Field(alias="for", description="The fault is undone after this time.")] = None


class Preset(Strict):
    """A published table of causes; see `torchaos gameday --presets`."""

    name: Annotated[str, Field(description="The name of the table.")]
    by: Annotated[
        Literal["count", "gpu_time"], Field(description="What gives the weights: number of events, or GPU time.")
    ] = "count"


class Arrivals(Strict):
    """The times of the faults, from the start of the game day. Exactly one of mtbf, gpu_mtbf, every and trace is
    given."""

    mtbf: Annotated[Length | None, Field(description="Poisson: the mean time between two faults.")] = None
    gpu_mtbf: Annotated[Length | None, Field(description="Poisson: the mean time between two faults of one GPU.")] = (
        None
    )
    gpus: Annotated[Count | None, Field(description="With gpu_mtbf: how many GPUs the cluster has.")] = None
    every: Annotated[Length | None, Field(description="The fixed time between two faults.")] = None
    trace: Annotated[list[Length] | None, Field(min_length=1, description="The times at which faults come.")] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Arrivals:
        if len(self.model_fields_set - {"gpus"}) != 1:
            raise ValueError("arrivals are drawn from one of mtbf, gpu_mtbf, every and trace; write exactly one")
        if (self.gpu_mtbf is None) != (self.gpus is None):
            raise ValueError("gpu_mtbf is for a cluster of so many gpus; write both")
        if self.trace and sorted(self.trace) != self.trace:
            raise ValueError("the times of a trace are in order; sort them")
        return self

    @property
    def mean_s(self) -> float | None:
        """The mean time between two faults, in seconds. Of n GPUs, one fails n times as often as a single one. None if
        the times of the faults are fixed (`every` or `trace`)."""
        return self.gpu_mtbf / self.gpus if self.gpu_mtbf and self.gpus else self.mtbf


class RoundSize(Strict):
    """The size of a round, which is one run. Each round starts the job again, which costs its start-up time."""

    faults: Annotated[Count, Field(description="At most this many faults.")] = 8
    length: Annotated[Length, Field(description="No fault comes later than this time after the round's start.")] = (
        1800.0
    )


class Bounds(Strict):
    """The bounds of the score of a game day. A share lies between 0 and 1."""

    ettr: Annotated[float | None, Field(ge=0, le=1, strict=False, description="At least.")] = None
    goodput: Annotated[float | None, Field(ge=0, le=1, strict=False, description="At least.")] = None
    mttr: Annotated[Length | None, Field(description="At most this mean time to catch up.")] = None
    mttr_p90: Annotated[Length | None, Field(description="Nine in ten recoveries take at most this time.")] = None
    lost_steps: Annotated[Index | None, Field(description="At most this many steps are done again in a recovery.")] = (
        None
    )
    checkpoint_share: Annotated[float | None, Field(ge=0, le=1, strict=False, description="At most.")] = None
    stuck: Annotated[Index, Field(description="At most this many faults without a recovery.")] = 0
    damaged: Annotated[Index, Field(description="At most this many rounds with a failed assertion.")] = 0
    lost_work: Annotated[Index | None, Field(description="At most this many resumes from an older checkpoint.")] = None
    unproved: Annotated[
        float,
        Field(ge=0, le=1, strict=False, description="The share of faults that may miss their target or have no proof."),
    ] = 0.1


class GameDay(Strict):
    """A game day: a job, and the faults that may hit it over hours."""

    gameday: Annotated[str, Field(pattern=NAME, description="Its name.")]
    description: Annotated[str, Field(description="For the report.")] = ""
    seed: Annotated[Index, Field(description="Decides all random choices.")] = 0
    job: Annotated[Job, Field(description="The job that the faults hit; {day} is a folder that its rounds share.")]
    duration: Annotated[Length, Field(description="The time during which faults come.")]
    arrivals: Annotated[Arrivals, Field(description="When faults come.")]
    preset: Annotated[Preset | None, Field(description="Causes and weights of a published table.")] = None
    faults: Annotated[list[Risk], Field(description="The faults that may come, with their weights.")] = Field(
        default_factory=list
    )
    rest: Annotated[Seconds, Field(description="No fault comes for this time after a recovery.")] = 10.0
    gate: Annotated[
        Literal["recovered", "none"],
        Field(description="Whether a fault waits for the recovery from the fault before it."),
    ] = "recovered"
    patience: Annotated[Length, Field(description="A job that makes no step for this time is stuck.")] = 300.0
    give_up: Annotated[Count, Field(description="This many stuck rounds in a row end the game day.")] = 3
    round: Annotated[RoundSize, Field(description="The size of a round, which is one run.")] = Field(
        default_factory=RoundSize
    )
    score: Annotated[Bounds, Field(description="The bounds of the score.")] = Field(default_factory=Bounds)
    assert_: Annotated[Items, Field(alias="assert", description="What must hold in every round.")] = Field(
        default_factory=list
    )
    steady_state: Annotated[Items, Field(description="What must hold before a round's first fault.")] = Field(
        default_factory=list
    )
    stop: Annotated[Items, Field(description="What ends a round early.")] = Field(default_factory=list)
    limits: Annotated[Limits, Field(description="The most that the faults of a round may hit.")] = Field(
        default_factory=Limits
    )
    consent: Annotated[
        list[str],
        Field(description="Consents for faults that may hurt the host; the command line must give them as well."),
    ] = Field(default_factory=list)
    launcher: Annotated[str, Field(description="What starts the job's nodes, see `torchaos list`.")] = "local"
    tags: Annotated[list[str], Field(description="Your own words, for your own tools.")] = Field(default_factory=list)

    @model_validator(mode="after")
    def _something(self) -> GameDay:
        if not self.faults and self.preset is None:
            raise ValueError("there are no faults; write `faults` or a `preset`")
        return self
