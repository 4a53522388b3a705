"""What is said of one scenario in the end: the shape of result.json, and what every report is made from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal, Mapping


class Verdict(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"  # nothing was judged: bad usage, an internal error, or not finished


class ExitCode(IntEnum):
    PASSED = 0
    FAILED = 1
    INCONCLUSIVE = 2
    USAGE = 3
    ROLLBACK = 4
    INTERNAL = 5


# The worst of several: 3 > 4 > 5 > 1 > 2 > 0.
_SEVERITY = (ExitCode.USAGE, ExitCode.ROLLBACK, ExitCode.INTERNAL, ExitCode.FAILED, ExitCode.INCONCLUSIVE, ExitCode.PASSED)


def worst(codes: list[ExitCode]) -> ExitCode:
    """The exit code of several scenarios; of none it is bad usage, since nothing was shown."""
    return min(codes, key=_SEVERITY.index, default=ExitCode.USAGE)


@dataclass(frozen=True)
class Case:
    """One line of the verdict: an assertion, the faults (landed, felt, outlived), or the rollback."""

    name: str
    kind: Literal["assertion", "faults", "rollback"]
    verdict: Verdict
    reason: str
    measured: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FaultResult:
    id: str
    inject: str
    target: str  # "rank 1"
    planned: str  # "step 25, backward"
    applied: str | None  # "step 25, backward, pid 4711, attempt 0"; None: it never landed
    evidence: str | None  # None: it was not felt
    rollback: str  # "not needed: a kill can't be undone", "verified", "INCOMPLETE: ..."
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Recovery:
    """One recovery, in seconds from the moment of injection; a part that was not seen is None."""

    fault: str
    parts: Mapping[str, float | None]  # felt, detected, torn_down, rendezvous, workers_up, restored, first_step, caught_up
    lost_steps: int | None


@dataclass(frozen=True)
class Result:
    scenario: str
    description: str
    seed: int
    verdict: Verdict
    exit_code: int
    reason: str
    run_dir: str
    started: str  # ISO 8601, UTC
    duration_s: float
    faults: tuple[FaultResult, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    cases: tuple[Case, ...] = ()
    steps: int | None = None  # the highest global step that counts
    attempts: int = 0
    twin: str = ""  # which twin it was judged against, or why there was none
    reproduce: str = ""  # the command line that runs it again
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # recognised causes in torch or gloo, hooks that failed, what can't be seen

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def write_atomically(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader sees the old or the new text and never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
