"""The grammar of a scenario: what may be written, with its types. `loader.py` loads it and says what is wrong.

Field descriptions go into the JSON Schema, and from there into the editor.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.scenario.job import Job
from torchaos.harness.scenario.strict import NAME, Count, Index, Strict

PhaseName = Literal[
    "any",
    "start",
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint_write",
    "checkpoint_written",
    "checkpoint_load",
]


OperationName = Literal[
    "all_reduce", "all_gather", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_to_all", "barrier"
]
COLLECTIVE = frozenset({"operation", "group", "min_bytes", "max_bytes"})


class Between(Strict):
    """A number drawn by the seed, both ends included."""

    between: Annotated[list[Index], Field(min_length=2, max_length=2, description="The smallest and the largest.")]

    @model_validator(mode="after")
    def _in_order(self) -> Between:
        if self.between[0] > self.between[1]:
            raise ValueError(
                f"between {self.between[0]} and {self.between[1]} lies nothing; write the smaller one first"
            )
        return self


class Target(Strict):
    """Whom a fault hits: exactly one of these. In a job of replicas, a rank is one of a replica."""

    rank: Annotated[Index | Literal["any"] | None, Field(description="This one; any is drawn by the seed.")] = None
    ranks: Annotated[list[Index] | None, Field(min_length=1, description="These.")] = None
    node: Annotated[
        Index | Literal["any"] | None, Field(description="All ranks of this node; any is drawn by the seed.")
    ] = None
    nodes: Annotated[list[Index] | None, Field(min_length=1, description="All ranks of these nodes.")] = None
    local_rank: Annotated[Index | None, Field(description="This local rank, on every node.")] = None
    count: Annotated[Count | None, Field(description="So many ranks, drawn by the seed.")] = None
    percent: Annotated[float | None, Field(gt=0, le=100, strict=False, description="So many percent of the ranks.")] = (
        None
    )
    all: Annotated[Literal[True] | None, Field(description="Every rank; `target: all` is the same.")] = None
    replica: Annotated[
        Index | None, Field(description="This replica: all of it, or the rank or ranks that stand beside it.")
    ] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Target:
        given = sorted(self.model_fields_set)
        if self.replica is not None and (given == ["replica"] or given in (["rank", "replica"], ["ranks", "replica"])):
            return self
        if len(given) != 1:
            raise ValueError(
                "a target names exactly one of rank, ranks, node, nodes, local_rank, count, percent and all; "
                f"this one names {', '.join(given) or 'none'}"
            )
        return self


class When(Strict):
    """When a fault lands: a point of the training loop, or something that is seen from outside."""

    step: Annotated[Count | Between | None, Field(description="During this step, counted over the whole training.")] = (
        None
    )
    phase: Annotated[
        PhaseName | None, Field(description="On entering this phase; without it at the start of the step.")
    ] = None
    nth: Annotated[Count, Field(description="The nth time that the phase is entered in that step.")] = 1
    operation: Annotated[OperationName | None, Field(description="On starting a collective of this kind.")] = None
    group: Annotated[str | None, Field(description="Of this process group: its name, or its description.")] = None
    min_bytes: Annotated[Index | None, Field(description="Of at least this size: what goes in or comes out.")] = None
    max_bytes: Annotated[Index | None, Field(description="Of at most this size.")] = None
    attempt: Annotated[Index | None, Field(description="Only in this attempt: 1 is after the first restart.")] = None
    time: Annotated[
        Seconds | None, Field(description="So long after the launch; beside after: no sooner than that.")
    ] = None
    after: Annotated[str | None, Field(description="After something happened to this earlier fault.")] = None
    state: Annotated[
        Literal["applied", "felt", "recovered", "rolled_back"], Field(description="What happened to that fault.")
    ] = "applied"
    checkpoints: Annotated[Count | None, Field(description="Once so many checkpoints have been saved.")] = None
    delay: Annotated[Seconds, Field(description="And so long after that.")] = 0.0

    @model_validator(mode="after")
    def _one_kind(self) -> When:
        collective = self.model_fields_set & COLLECTIVE
        inside = self.model_fields_set & {"step", "phase", "nth", "attempt"} | collective
        outside = self.model_fields_set & {"time", "after", "state", "checkpoints", "delay"}
        if not inside and not outside:
            raise ValueError("a trigger says when: write step, phase, attempt, time, after or checkpoints")
        if inside and outside:
            raise ValueError(
                f"{min(inside)} and {min(outside)} can't be combined: one is seen in the rank, one from outside"
            )
        if collective and self.phase not in (None, "collective"):
            raise ValueError(f"{min(collective)} tells collectives apart; the phase {self.phase} is none")
        if "nth" in inside and self.phase is None and not collective:
            raise ValueError("nth counts a phase; name the phase too")
        if inside and self.step is None and self.attempt is None:
            raise ValueError("a phase alone comes in every step; name a step or an attempt too")
        if self.phase == "start" and self.attempt is None:
            raise ValueError("start comes once in each attempt; name the attempt, not a step")
        if "state" in outside and self.after is None:
            raise ValueError("state says what happened to another fault; name it with after")
        if "delay" in outside and not outside & {"after", "checkpoints"}:
            raise ValueError("delay counts from something; write time, or name after or checkpoints too")
        return self


class Fault(Strict):
    """What goes wrong, in whom, and when."""

    inject: Annotated[str, Field(description="The injector's name; `torchaos list` shows all.")]
    id: Annotated[str | None, Field(pattern=NAME, description="How other faults and the report call it.")] = None
    target: Annotated[
        Target | None, BeforeValidator(lambda value: {"all": True} if value == "all" else value),
        Field(description="Whom it hits. Faults that hit files or endpoints have none."),
    ] = None  # fmt: skip
    when: Annotated[When, Field(description="When it lands.")]
    with_: Annotated[dict[str, Any], Field(alias="with", description="The injector's parameters.")] = Field(
        default_factory=dict
    )
    for_: Annotated[
        Seconds | None, Field(alias="for", description="Taken back after this long; else when the run ends.")
    ] = None
    times: Annotated[Count, Field(description="How often it fires in all, restarts included.")] = 1


class Never(Strict):
    """What no fault may ever hit; a random target is drawn among the others."""

    ranks: Annotated[list[Index], Field(description="These ranks.")] = Field(default_factory=list)
    nodes: Annotated[list[Index], Field(description="All ranks of these nodes.")] = Field(default_factory=list)


class Limits(Strict):
    """Blast radius: a plan that goes beyond it is refused, and a fault that would go beyond it does not land."""

    ranks: Annotated[Count | None, Field(description="So many ranks at most, over all faults of the run.")] = None
    nodes: Annotated[Count | None, Field(description="On so many nodes at most.")] = None
    percent: Annotated[
        float | None, Field(gt=0, le=100, strict=False, description="So many percent of the job's ranks at most.")
    ] = None
    duration: Annotated[Seconds | None, Field(description="No fault lasts longer; it is then taken back.")] = None
    never: Annotated[Never, Field(description="Whom no fault may hit.")] = Field(default_factory=Never)


class Twin(Strict):
    """The fault-free run that the faulted one is compared with; more than one only where the first differs."""

    runs: Annotated[int, Field(ge=0, le=5, description="So many at most; `twin: none` is 0.")] = 3


class Repeat(Strict):
    """How often the scenario is run, with seeds counted up, and how many of them must pass: all, unless said here."""

    times: Annotated[Count, Field(description="How often; `repeat: 30` is the same.")]
    at_least: Annotated[Count | None, Field(description="So many of them must pass.")] = None
    rate: Annotated[
        float | None, Field(gt=0, lt=1, description="The share that passes must be shown to be at least this.")
    ] = None
    confidence: Annotated[float, Field(gt=0, lt=1, description="Of the bounds of that share.")] = 0.95

    @model_validator(mode="after")
    def _one_criterion(self) -> Repeat:
        if self.at_least is not None and self.rate is not None:
            raise ValueError("at_least counts repetitions and rate asks for a share; write one of them")
        if self.at_least is not None and self.at_least > self.times:
            raise ValueError(f"at least {self.at_least} of {self.times} can never pass; write fewer, or more times")
        return self


def _item(value: Any) -> Any:
    """`name` or `{name: {parameter: value}}`, or `{name: }`."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and len(value) == 1:
        name, params = next(iter(value.items()))
        return {"name": name, "params": {} if params is None else params}
    raise ValueError("write a name, or one name with its parameters: `- recovery_time: {catch_up: 60s}`")


class Item(Strict):
    """An assertion or a condition."""

    name: Annotated[str, Field(description="`torchaos list` shows all.")]
    params: Annotated[dict[str, Any], Field(description="Its bounds, written as `name: {bound: value}`.")] = Field(
        default_factory=dict
    )


Items = list[Annotated[Item, BeforeValidator(_item)]]


class Scenario(Strict):
    """One experiment: a job, what goes wrong in it, and what must hold all the same."""

    scenario: Annotated[str, Field(pattern=NAME, description="Its name: small letters, digits, dots and dashes.")]
    description: Annotated[str, Field(description="What it shows, for reports.")] = ""
    seed: Annotated[Index, Field(description="Decides everything that is drawn.")] = 0
    job: Annotated[Job, Field(description="The job that the faults hit.")]
    faults: Annotated[list[Fault], Field(description="What goes wrong, each at its own moment.")] = Field(
        default_factory=list
    )
    assert_: Annotated[Items, Field(alias="assert", min_length=1, description="What must hold all the same.")]
    steady_state: Annotated[Items, Field(description="What must hold before any fault is injected.")] = Field(
        default_factory=list
    )
    stop: Annotated[Items, Field(description="What ends the run early.")] = Field(default_factory=list)
    until: Annotated[Items, Field(description="What ends the run on purpose: all of it together.")] = Field(
        default_factory=list
    )
    limits: Annotated[Limits, Field(description="Blast radius.")] = Field(default_factory=Limits)
    consent: Annotated[
        list[str],
        Field(description="What may hurt the host, such as kmsg or clock; the command line must say it too."),
    ] = Field(default_factory=list)
    twin: Annotated[
        Twin, BeforeValidator(lambda value: {"runs": 0} if value == "none" else value),
        Field(description="How often the job is run without its faults, to compare with; or none."),
    ] = Field(default_factory=Twin)  # fmt: skip
    repeat: Annotated[
        Repeat | None, BeforeValidator(lambda value: {"times": value} if isinstance(value, int) else value),
        Field(description="How often it is run; a number, or with what is asked of the repetitions."),
    ] = None  # fmt: skip
    launcher: Annotated[str, Field(description="Where the job's nodes are: local, netns, docker.")] = "local"
    tags: Annotated[list[str], Field(description="Words of yours, for what reads the file.")] = Field(
        default_factory=list
    )
