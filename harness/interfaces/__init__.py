"""The interfaces on which plug-ins and the harness agree. No interface mentions a particular implementation. All names
are imported from this package. The base classes of faults, assertions and conditions are in `base_classes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Mapping

from torchaos.harness.interfaces.jobs import (
    Capability,
    CheckpointFormat,
    Emit,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    JobSpec,
    Launcher,
    LiveNode,
    Node,
    NodeSite,
    Probe,
    RankProcess,
    RemoteLauncher,
    Site,
    Target,
    Touches,
    Watched,
    Where,
)

__all__ = [
    "Capability", "ChaosError", "CheckpointFormat", "Emit", "Evidence", "RemoteLauncher", "Finding", "First",
    "Handle", "Harm", "Hits", "Irreversible", "JobSpec", "Launcher", "LiveNode", "Need", "Node", "NodeSite",
    "Outcome", "Probe", "RankProcess", "Site", "Target", "Touches", "UsageError", "Watched", "What", "Where", "failed",
    "inconclusive", "passed", "unhit",
]  # fmt: skip


class ChaosError(Exception):
    """An error whose text is meant for the user: it says where the problem is, what is wrong, and what to do. It is
    shown without a traceback."""

    exit_code = 5


class UsageError(ChaosError):
    """The command line, the scenario or the machine can't do what is asked."""

    exit_code = 3


class Need(str, Enum):
    """The data that an assertion needs. Each kind switches on hooks of the agent or stages of the run."""

    STEPS = "steps"
    LOSS = "loss"
    SAMPLES = "samples"
    CHECKPOINTS = "checkpoints"  # saves and loads as events
    INVENTORY = "inventory"  # the checkpoints on disk after the run, tensor by tensor
    TWIN = "twin"
    STATE = "state"  # a check sum of the parameters after each step, and the gradient's norm
    HANGS = "hangs"  # hangs, as seen from outside: suspected, declared, and the ranks to blame
    LEFTOVERS = "leftovers"  # processes, ports and shared memory that are still there when the job has ended
    COLLECTIVES = "collectives"  # begin and end of each collective, in the files of protocol/collective_stamps.py


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


class Harm(str, Enum):
    """What a failure of an assertion means for a job."""

    WRONG_RESULT = "wrong result"  # its results or checkpoints differ from those without the fault
    LOST_WORK = "lost work"  # it resumed from an older checkpoint than its newest
    SLOW = "slow"  # it took more time or more restarts than allowed
    REACTION = "reaction"  # the fault was not noticed, or the expected reaction did not come
    ENDING = "ending"  # the job did not end as expected
    OTHER = "other"


class What(str, Enum):
    """The quantities in which a run may differ from its twin, or from its first execution of a step."""

    LOSS = "loss"
    LOSSES = "number of losses"  # backwards in a step
    RATE = "learning rate"
    SAMPLES = "samples"
    COMPUTED = "computed samples"  # by the job itself, from its parameters
    PARAMETERS = "parameters"  # after the step
    REPLICAS = "replicas"  # ranks that should hold the same parameters, after the step
    LOADED = "loaded checkpoint"  # a checkpoint of that step, with wrong contents
    SAVED = "saved checkpoint"  # a checkpoint of that step
    ABSENT = "absent step"  # a step that never took place, between others
    # The job and its twin ended in different steps; the step is the last of both, or one of one alone.
    LAST = "last step"
    UNHIT = "fault that did not land"  # there was nothing to judge; the step is 0
    ENDING = "ending"  # the job did not come back, or did not end as expected; the step is the last that was seen


@dataclass(frozen=True)
class First:
    """The first quantity that was wrong, and its global step. It helps to tell a cause from its consequences."""

    what: What
    step: int


@dataclass(frozen=True)
class Finding:
    """The answer of one assertion. `reason`: one or two sentences that a person understands without the code.
    `measured` and `bound`: values by name. `first`: the first quantity that differs. `cause`: the most likely cause
    in a few words, which the reason also contains. `at_s`: when it went wrong, in seconds of CLOCK_MONOTONIC; None:
    when the step of `first` was done."""

    outcome: Outcome
    reason: str
    measured: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    first: First | None = None
    cause: str = ""
    at_s: float | None = None


def passed(reason: str, **measured: Any) -> Finding:
    return _answer(passed, Finding(Outcome.PASSED, reason, measured))


def failed(reason: str, first: First | None = None, /, **measured: Any) -> Finding:
    return _answer(failed, Finding(Outcome.FAILED, reason, measured, first=first))


def inconclusive(reason: str, first: First | None = None, /, **measured: Any) -> Finding:
    return _answer(inconclusive, Finding(Outcome.INCONCLUSIVE, reason, measured, first=first))


def _answer(made_by: Callable[..., Finding], finding: Finding) -> Finding:
    """The finding. Raises TypeError if one of its fields was given as a measured value."""
    for name in (each.name for each in fields(Finding) if each.name in finding.measured):
        raise TypeError(
            f"{name} is a field of a Finding, not a measured value; write replace({made_by.__name__}(...), {name}=...) "
            "with replace of dataclasses"
        )
    return finding


def unhit(reason: str) -> Finding:
    """An inconclusive finding: no fault landed that this assertion is about."""
    return Finding(Outcome.INCONCLUSIVE, reason, first=First(What.UNHIT, 0))
