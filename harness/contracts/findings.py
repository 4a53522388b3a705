"""A question about a run, and the answers to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Protocol, Sequence, runtime_checkable

if TYPE_CHECKING:
    from torchaos.harness.record.record import Record


class Need(str, Enum):
    """Data that an assertion needs; each switches on hooks or stages."""

    STEPS = "steps"
    LOSS = "loss"
    SAMPLES = "samples"
    CHECKPOINTS = "checkpoints"  # saves and loads as events
    INVENTORY = "inventory"  # what lies on disk afterwards, tensor by tensor
    TWIN = "twin"
    STATE = "state"  # a check sum of the parameters after each step, and the gradient's norm
    HANGS = "hangs"  # observed from outside: suspected, declared, and who is to blame
    LEFTOVERS = "leftovers"  # processes, ports and shared memory that are still there when the job has ended
    COLLECTIVES = "collectives"  # when each began and ended, in the files of agent/stamps.py


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


class Harm(str, Enum):
    """What a failure of an assertion means for a job."""

    WRONG_RESULT = "wrong result"  # what it computes or keeps is not what it would have been
    LOST_WORK = "lost work"  # it went on from an older checkpoint than it had
    SLOW = "slow"  # it took longer, or more restarts, than allowed
    REACTION = "reaction"  # nobody noticed, or did what was to be done
    ENDING = "ending"  # it did not end as it should
    OTHER = "other"


class What(str, Enum):
    """The quantities in which a run may differ from its twin, or from its first execution of a step."""

    LOSS = "loss"
    LOSSES = "number of losses"  # backwards in a step
    RATE = "learning rate"
    SAMPLES = "samples"
    PARAMETERS = "parameters"  # after the step
    REPLICAS = "replicas"  # ranks that should hold the same parameters, after the step
    LOADED = "loaded checkpoint"  # of that step, with wrong contents
    SAVED = "saved checkpoint"  # of that step
    ABSENT = "absent step"  # it never took place
    ENDING = "ending"  # the job did not come back, or did not end as it should; the step is the last one seen


@dataclass(frozen=True)
class First:
    """The first quantity that was wrong, and its global step: it separates a cause from its consequences."""

    what: What
    step: int


@dataclass(frozen=True)
class Finding:
    """The answer of one assertion. `reason`: one or two sentences that a person understands without the code."""

    outcome: Outcome
    reason: str
    measured: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    first: First | None = None
    cause: str = ""  # the likeliest, in a few words; the reason has it too


def passed(reason: str, **measured: Any) -> Finding:
    return Finding(Outcome.PASSED, reason, measured)


def failed(reason: str, first: First | None = None, /, **measured: Any) -> Finding:
    return Finding(Outcome.FAILED, reason, measured, first=first)


def inconclusive(reason: str, **measured: Any) -> Finding:
    return Finding(Outcome.INCONCLUSIVE, reason, measured)


@runtime_checkable
class Assertion(Protocol):
    """One question about a run. A frozen dataclass: its fields are the bounds that the scenario gives. `harm`,
    `expects_recovery` and `judge_replicas` are optional: the registry gives them to a class that lacks them."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    harm: ClassVar[Harm] = Harm.OTHER  # what it means when it fails

    @property
    def expects_recovery(self) -> bool:
        """Whether the job is meant to recover from its faults, and not to give up."""
        return True

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Pure: reads the records and nothing else."""

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Judges a job of several replicas; it may be one of the functions of judging/replicas.py."""
        return inconclusive(
            f"{self.name} knows one torchrun's ranks, and can't judge a job of {run.plan.job.replicas} replicas"
        )
