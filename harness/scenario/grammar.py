"""The keys of a scenario and of its job, with their types. `loader.py` loads a file and reports mistakes. The keys that
belong to one launcher are in the launcher's file.

The descriptions of the fields appear in the reference, in the JSON Schema, and so in editors."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from torchaos.harness.base_classes import Seconds
from torchaos.harness.scenario.field_types import NAME, Bytes, Count, Index, Strict


class Checkpoints(Strict):
    """The job's checkpoints, which torchaos reads, judges and damages."""

    path: Annotated[str, Field(min_length=1, description="The folder below which the job keeps its checkpoints.")]
    size: Annotated[
        Bytes | None,
        Field(
            ge=1,
            description="Mounts a file system in memory, of this size, as the folder; the folder must be below {run}.",
        ),
    ] = None
    local: Annotated[
        str | None,
        Field(
            description="A folder below path of which each node has its own, in memory: the node's local disk. What is "
            "in it is gone with the node. For launcher: netns.",
        ),
    ] = None

    @model_validator(mode="after")
    def _below_the_path(self) -> Checkpoints:
        if self.local is not None and (
            not self.local.startswith(f"{self.path.rstrip('/')}/")
            or not self.local.startswith("{run}/")
            or {".", ".."} & set(self.local.split("/"))
        ):
            raise ValueError(f"local: each node has a folder of its own below path; write {self.path}/local")
        return self

    @model_validator(mode="after")
    def _inside_the_run(self) -> Checkpoints:
        parts = self.path.rstrip("/").split("/")
        if self.size is not None and (parts[0] != "{run}" or len(parts) < 2 or {"", ".", ".."} & set(parts)):
            raise ValueError(
                f"torchaos mounts nothing outside the run's own folder; write path: {{run}}/..., not {self.path}"
            )
        return self


class Resubmit(Strict):
    """Starts the command again after a failure, as a scheduler does with torchrun."""

    times: Annotated[Count, Field(description="How often the command is started again when it exits with an error.")]
    delay: Annotated[Seconds, Field(description="The time between the exit and the next start.")] = 0.0
    command: Annotated[
        str | list[str] | None,
        Field(description="Another command line for the next starts: another version, precision or number of ranks."),
    ] = None
    env: Annotated[dict[str, str], Field(description="Variables to add to the environment of the next starts.")] = (
        Field(default_factory=dict)
    )


class Log(Strict):
    """How steps and losses are read from the job's output. It is needed if the agent can't see the steps."""

    format: Annotated[str | None, Field(description="A known format, such as torchtitan, megatron or hf.")] = None
    regex: Annotated[
        str | None, Field(description="Your own regular expression, with the named groups step, loss and lr.")
    ] = None
    path: Annotated[str | None, Field(description="The log file, if the job does not print to its output.")] = None


def _address(text: str) -> str:
    if not re.fullmatch(r"[^\s:/]+:\d{1,5}", text):
        raise ValueError(f"{text!r} is not an address; write host:port, such as 127.0.0.1:9000")
    return text


class Job(Strict):
    """The training run under test."""

    command: Annotated[
        str | list[str],
        Field(description="The torchrun command line, as you would type it. {run}: the run's own folder; {jobs}: the "
              "jobs that come with torchaos; {here}: the folder of this file; {python}: torchaos's own Python."),
    ]  # fmt: skip
    cwd: Annotated[str, Field(description="The working directory, relative to this file.")] = "."
    env: Annotated[
        dict[str, str], Field(description="Variables to add to the environment; values are text, as they are written.")
    ] = Field(default_factory=dict)
    checkpoints: Annotated[Checkpoints | None, Field(description="Where the checkpoints are.")] = None
    endpoints: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], Annotated[str, AfterValidator(_address)]],
        Field(description="Addresses that the job uses: host:port by name. {endpoint.NAME} in command and env becomes "
              "the address, or the address of a proxy if a fault hits the endpoint. rendezvous: where the nodes meet."),
    ] = Field(default_factory=dict)  # fmt: skip
    timeout: Annotated[Seconds, Field(description="The run is ended after this time.")] = 600.0
    world_size: Annotated[Count | None, Field(description="The number of ranks, if the command does not show it.")] = (
        None
    )
    nodes: Annotated[Count | None, Field(description="The number of nodes, if the command does not show it.")] = None
    replicas: Annotated[
        Count, Field(description="How many times the command is started side by side, as for torchft's replica groups.")
    ] = 1
    log: Annotated[Log | None, Field(description="How to read steps and losses from the job's log.")] = None
    resubmit: Annotated[
        Resubmit | None, Field(description="Start the command again when it fails; without it, it is started once.")
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of all launchers, see `checks.with_settings`, with their values."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in Job.model_fields}


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
    "new_epoch",
]


OperationName = Literal[
    "all_reduce",
    "all_gather",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
]
COLLECTIVE = frozenset({"operation", "group", "min_bytes", "max_bytes"})


class Between(Strict):
    """A number that is drawn at random from a range, which includes both ends. The seed decides."""

    between: Annotated[
        list[Index], Field(min_length=2, max_length=2, description="The smallest and the largest number.")
    ]

    @model_validator(mode="after")
    def _in_order(self) -> Between:
        if self.between[0] > self.between[1]:
            raise ValueError(
                f"no number is between {self.between[0]} and {self.between[1]}; write the smaller number first"
            )
        return self


class Target(Strict):
    """The ranks or nodes that a fault hits. Exactly one of these keys must be given. In a job with replicas, the ranks
    of each replica are numbered from 0."""

    rank: Annotated[
        Index | Literal["any"] | None, Field(description="A rank by its number; `any`: drawn at random from the seed.")
    ] = None
    ranks: Annotated[list[Index] | None, Field(min_length=1, description="Ranks by their numbers.")] = None
    node: Annotated[
        Index | Literal["any"] | None, Field(description="All ranks of a node; `any`: drawn at random from the seed.")
    ] = None
    nodes: Annotated[list[Index] | None, Field(min_length=1, description="All ranks of several nodes.")] = None
    local_rank: Annotated[Index | None, Field(description="The rank with this local rank on every node.")] = None
    count: Annotated[Count | None, Field(description="So many ranks, drawn at random from the seed.")] = None
    percent: Annotated[
        float | None,
        Field(gt=0, le=100, strict=False, description="A percentage of the ranks, drawn at random from the seed."),
    ] = None
    all: Annotated[Literal[True] | None, Field(description="All ranks; `target: all` is the same.")] = None
    replica: Annotated[
        Index | None, Field(description="A replica: all its ranks, or those in the key `rank` or `ranks` beside it.")
    ] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Target:
        given = sorted(self.model_fields_set)
        if self.replica is not None and (given == ["replica"] or given in (["rank", "replica"], ["ranks", "replica"])):
            return self
        if len(given) != 1:
            raise ValueError(
                "a target names exactly one of rank, ranks, node, nodes, local_rank, count, percent and all; "
                f"this target names {', '.join(given) or 'none'}"
            )
        return self


class When(Strict):
    """The time at which a fault lands: at a point of the training loop, or after an event that is seen from outside."""

    step: Annotated[Count | Between | None, Field(description="In this step, counted over the whole training.")] = None
    phase: Annotated[
        PhaseName | None, Field(description="When this phase begins; without it, when the step begins.")
    ] = None
    nth: Annotated[Count, Field(description="When the phase begins for the nth time in the step.")] = 1
    operation: Annotated[OperationName | None, Field(description="When a collective of this kind begins.")] = None
    group: Annotated[
        str | None, Field(description="Only collectives of this process group: its name, or its description.")
    ] = None
    min_bytes: Annotated[
        Index | None, Field(description="Only collectives whose input or output has at least this size in bytes.")
    ] = None
    max_bytes: Annotated[Index | None, Field(description="Only collectives of at most this size in bytes.")] = None
    attempt: Annotated[Index | None, Field(description="Only in this attempt: 1 is after the first restart.")] = None
    time: Annotated[
        Seconds | None, Field(description="This time after the launch; together with `after`: not before this time.")
    ] = None
    after: Annotated[
        str | None, Field(description="The id of an earlier fault: when that fault has reached `state`.")
    ] = None
    state: Annotated[
        Literal["applied", "felt", "recovered", "rolled_back"],
        Field(description="The state that the fault in `after` must reach."),
    ] = "applied"
    checkpoints: Annotated[Count | None, Field(description="When this number of checkpoints has been saved.")] = None
    delay: Annotated[Seconds, Field(description="A further delay, after `after` or `checkpoints`.")] = 0.0

    @model_validator(mode="after")
    def _one_kind(self) -> When:
        collective = self.model_fields_set & COLLECTIVE
        inside = self.model_fields_set & {"step", "phase", "nth", "attempt"} | collective
        outside = self.model_fields_set & {"time", "after", "state", "checkpoints", "delay"}
        if not inside and not outside:
            raise ValueError("a trigger needs a time: write step, phase, attempt, time, after or checkpoints")
        if inside and outside:
            raise ValueError(
                f"{min(inside)} and {min(outside)} can't be combined: one is seen in the rank, one from outside"
            )
        if collective and self.phase not in (None, "collective"):
            raise ValueError(f"{min(collective)} selects collectives; the phase {self.phase} is not a collective")
        if "nth" in inside and self.phase is None and not collective:
            raise ValueError("nth counts a phase; name the phase too")
        if inside and self.step is None and self.attempt is None:
            raise ValueError("a phase alone comes in every step; name a step or an attempt too")
        if self.phase == "start" and self.attempt is None:
            raise ValueError("start comes once in each attempt; name the attempt, not a step")
        if "state" in outside and self.after is None:
            raise ValueError("state is about another fault; name that fault with after")
        if "delay" in outside and not outside & {"after", "checkpoints"}:
            raise ValueError("delay needs a start; write time, or name after or checkpoints too")
        return self


class Fault(Strict):
    """One fault: its injector, its target, and its time."""

    inject: Annotated[str, Field(description="The injector's name; `torchaos list injectors` shows all.")]
    id: Annotated[
        str | None, Field(pattern=NAME, description="Its name in `after` of other faults, and in reports.")
    ] = None
    target: Annotated[
        Target | None, BeforeValidator(lambda value: {"all": True} if value == "all" else value),
        Field(description="The ranks or nodes that it hits. Faults that hit files or endpoints have no target."),
    ] = None  # fmt: skip
    when: Annotated[When, Field(description="When it lands.")]
    with_: Annotated[dict[str, Any], Field(alias="with", description="The injector's parameters.")] = Field(
        default_factory=dict
    )
    for_: Annotated[
        Seconds | None,
        Field(alias="for", description="How long it lasts; without it, `limits.duration` or until the run ends."),
    ] = None
    times: Annotated[Count, Field(description="How often it lands in total, restarts included.")] = 1


class Never(Strict):
    """The ranks and nodes that no fault may hit. A random target is drawn from the rest."""

    ranks: Annotated[list[Index], Field(description="These ranks.")] = Field(default_factory=list)
    nodes: Annotated[list[Index], Field(description="All ranks of these nodes.")] = Field(default_factory=list)


class Limits(Strict):
    """The blast radius: a plan that exceeds it is refused, and a fault that would exceed it is not applied."""

    ranks: Annotated[Count | None, Field(description="The most ranks that the faults of a run may hit together.")] = (
        None
    )
    nodes: Annotated[Count | None, Field(description="The most nodes that the faults of a run may hit together.")] = (
        None
    )
    percent: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            strict=False,
            description="The most ranks that the faults of a run may hit together, in percent of the job's ranks.",
        ),
    ] = None
    duration: Annotated[
        Seconds | None, Field(description="The longest time that a fault may last; then it is undone.")
    ] = None
    never: Annotated[Never, Field(description="Ranks and nodes that no fault may hit.")] = Field(default_factory=Never)


class Twin(Strict):
    """The fault-free runs that the run is compared with. More than one twin is run only if the first one differs."""

    runs: Annotated[int, Field(ge=0, le=5, description="The largest number of twins; `twin: none` is 0.")] = 3


class Repeat(Strict):
    """How often the scenario is run, with the seed increased by 1 each time, and how many runs must pass: all, unless
    `at_least` or `rate` is given."""

    times: Annotated[Count, Field(description="The number of runs; `repeat: 30` is the same.")]
    at_least: Annotated[Count | None, Field(description="The number of runs that must pass.")] = None
    rate: Annotated[
        float | None, Field(gt=0, lt=1, description="The runs must show that at least this share of runs passes.")
    ] = None
    confidence: Annotated[float, Field(gt=0, lt=1, description="The confidence with which `rate` is shown.")] = 0.95

    @model_validator(mode="after")
    def _one_criterion(self) -> Repeat:
        if self.at_least is not None and self.rate is not None:
            raise ValueError("at_least counts repetitions and rate asks for a share; write one of them")
        if self.at_least is not None and self.at_least > self.times:
            raise ValueError(f"at least {self.at_least} of {self.times} can never pass; write fewer, or more times")
        return self


def _item(value: Any) -> Any:
    """Accepts the forms `name`, `{name: {parameter: value}}` and `{name: }`."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and len(value) == 1:
        name, params = next(iter(value.items()))
        return {"name": name, "params": {} if params is None else params}
    raise ValueError("write a name, or a name with its parameters: `- recovery_time: {catch_up: 60s}`")


class Item(Strict):
    """An assertion or a condition, as a scenario names it."""

    name: Annotated[str, Field(description="Its name; `torchaos list` shows all.")]
    params: Annotated[dict[str, Any], Field(description="Its parameters, as `name: {parameter: value}`.")] = Field(
        default_factory=dict
    )


Items = list[Annotated[Item, BeforeValidator(_item)]]


class Scenario(Strict):
    """One experiment: a job, the faults that hit it, and the assertions that must hold despite the faults."""

    scenario: Annotated[str, Field(pattern=NAME, description="Its name: small letters, digits, dots and dashes.")]
    description: Annotated[str, Field(description="What it shows; for reports.")] = ""
    seed: Annotated[Index, Field(description="The number from which all random choices are drawn.")] = 0
    job: Annotated[Job, Field(description="The job that the faults hit.")]
    faults: Annotated[list[Fault], Field(description="The faults, each with its own target and trigger.")] = Field(
        default_factory=list
    )
    assert_: Annotated[Items, Field(alias="assert", min_length=1, description="The assertions that must hold.")]
    steady_state: Annotated[Items, Field(description="Conditions that must all hold before any fault is applied.")] = (
        Field(default_factory=list)
    )
    stop: Annotated[Items, Field(description="Conditions; the run ends early if one of them holds.")] = Field(
        default_factory=list
    )
    until: Annotated[Items, Field(description="Conditions; the run ends on purpose when all of them hold.")] = Field(
        default_factory=list
    )
    limits: Annotated[Limits, Field(description="The blast radius.")] = Field(default_factory=Limits)
    consent: Annotated[
        list[str],
        Field(
            description="Consents for faults that may hurt the host, such as kmsg or clock; the command line must give "
            "them as well."
        ),
    ] = Field(default_factory=list)
    twin: Annotated[
        Twin, BeforeValidator(lambda value: {"runs": 0} if value == "none" else value),
        Field(description="The fault-free runs to compare with; or `none`."),
    ] = Field(default_factory=Twin)  # fmt: skip
    repeat: Annotated[
        Repeat | None, BeforeValidator(lambda value: {"times": value} if isinstance(value, int) else value),
        Field(description="How often the scenario is run: a number, or a mapping that says how many must pass."),
    ] = None  # fmt: skip
    launcher: Annotated[str, Field(description="What makes the job's nodes, see `torchaos list`.")] = "local"
    tags: Annotated[list[str], Field(description="Your own words, for your own tools.")] = Field(default_factory=list)
