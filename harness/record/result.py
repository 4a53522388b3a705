"""The result of one scenario. It is written to result.json, and every report is made from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum
from typing import Any, Iterable, Literal, Mapping, Sequence

from torchaos.harness.interfaces import UsageError

SCHEMA = 1  # of result.json; increased when older readers would misunderstand the new form


class Verdict(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"  # nothing was judged: bad usage, an internal error, or not finished

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode[self.name] if self is not Verdict.ERROR else ExitCode.INTERNAL


def verdicts_in_words(verdicts: Iterable[Verdict]) -> str:
    """The number of each verdict: `3 passed, 1 failed`."""
    every = list(verdicts)
    return ", ".join(f"{every.count(one)} {one.value}" for one in Verdict if one in every)


class ExitCode(IntEnum):
    PASSED = 0  # passed
    FAILED = 1  # an assertion failed
    INCONCLUSIVE = 2  # inconclusive: this run is no evidence
    USAGE = 3  # bad usage, or a scenario that can't be carried out here
    ROLLBACK = 4  # the rollback is incomplete: the machine is not as it was
    INTERNAL = 5  # internal error

    @property
    def verdict(self) -> Verdict:
        return Verdict.__members__.get(self.name, Verdict.ERROR)


# From the worst to the best: 3, 4, 5, 1, 2, 0.
_SEVERITY = (
    ExitCode.USAGE,
    ExitCode.ROLLBACK,
    ExitCode.INTERNAL,
    ExitCode.FAILED,
    ExitCode.INCONCLUSIVE,
    ExitCode.PASSED,
)


def worst(codes: list[ExitCode]) -> ExitCode:
    """The worst of these exit codes. If there is none: bad usage, because then nothing was shown."""
    return min(codes, key=_SEVERITY.index, default=ExitCode.USAGE)


@dataclass(frozen=True)
class Case:
    """One line of the verdict: an assertion, the faults, or the rollback."""

    name: str
    kind: Literal["assertion", "faults", "rollback"]
    verdict: Verdict
    reason: str
    measured: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    seconds: tuple[str, ...] = ()  # the keys of `measured` and `bound` that are durations
    follows: str | None = None  # the failed case that this failure follows from
    cause: str = ""  # the most likely cause in a few words, also part of the reason
    at_s: float | None = None  # when it went wrong, in seconds since the run began; None: not known

    @property
    def full_reason(self) -> str:
        """The reason. If this case follows from another case, that case is named first."""
        return f"(follows from {self.follows}) {self.reason}" if self.follows else self.reason


def root_first(cases: Sequence[Case]) -> list[Case]:
    """The cases in the order of reports: a case that follows from another case comes right after that case."""
    found = [case for case in cases if case.follows is None]
    for case in (case for case in reversed(cases) if case.follows is not None):
        at = next((place for place, other in enumerate(found, 1) if other.name == case.follows), len(found))
        found.insert(at, case)
    return found


@dataclass(frozen=True)
class FaultResult:
    id: str
    inject: str
    target: str  # "rank 1"
    planned: str  # "step 25, backward"
    applied: str | None  # "step 25, backward, pid 4711, attempt 0"; None: it never landed
    evidence: str | None  # None: it was not felt
    rollback: str  # "not possible: a dead process can't be ...", "not needed", "verified", "INCOMPLETE: ..."
    verdict: Verdict
    reason: str
    proved: bool = True  # it landed as planned and was felt, so the run is evidence
    # Of a network: values that were requested and measured, by name: {"delay_ms": {"asked": 50.0, "measured": 50.3}}
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    imitates: str = ""  # whose report the fault imitates; empty: it imitates no report
    replays: str = ""  # the record of a real machine that the fault replays; empty: it replays none


@dataclass(frozen=True)
class Recovery:
    """One recovery, in seconds since the fault was applied; a part that was not seen is None."""

    fault: str
    parts: Mapping[str, float | None]  # by the names of analysis/recovery_times.py, PARTS
    lost_steps: int | None
    advice: tuple[str, ...] = ()  # which waits were long, and which settings shorten them; no verdict depends on it
    lasted_s: float | None = None  # how long the fault itself was on; None if it does not last, or stayed on
    at_s: float | None = None  # when the fault was applied, CLOCK_MONOTONIC; None: older results lack it
    # The ranks that the fault hit and of which no later step was seen, although the job came to its end.
    unseen: tuple[int, ...] = ()
    cut_off: bool = False  # the run was ended, from outside, before the job had caught up
    unplaced: bool = False  # it is not known which global steps the job made, so it is not known when it caught up


def each_restart(recoveries: Iterable[Recovery]) -> list[Recovery]:
    """One recovery for each restart: of several recoveries that ended with the same first step, the one with the most
    lost steps."""
    found: dict[object, Recovery] = {}
    for number, one in enumerate(recoveries):
        first = one.parts.get("first_step")
        restart = number if one.at_s is None or first is None else f"at {one.at_s + first:.3f} s"
        found[restart] = max(found.get(restart, one), one, key=lambda each: each.lost_steps or 0)
    return list(found.values())


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
    twin: str = ""  # the twin with which it was compared, or why there was none
    reproduce: str = ""  # the command line that runs it again
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # recognised causes in torch or gloo, hooks that failed, what can't be seen
    decided_by: str = ""  # the case that decided; empty if passed, ended early, or with a damaged journal
    last_words: tuple[str, ...] = ()  # the last lines of the log of a job that died by itself, also part of the reason

    schema: int = SCHEMA

    def assertions(self, verdict: Verdict) -> list[Case]:
        """The cases of assertions that have this verdict."""
        return [case for case in self.cases if case.kind == "assertion" and case.verdict is verdict]

    def to_json(self) -> dict[str, Any]:
        """JSON that every reader accepts. NaN and infinities become words, lone surrogates become escapes."""
        found: dict[str, Any] = _as_json(asdict(self))
        return found

    @classmethod
    def from_json(cls, raw: Any) -> Result:
        """The result, from its JSON. Ignores unknown keys. Raises UsageError if it is no result, or of a later
        schema."""
        try:
            if int(raw["schema"]) > SCHEMA:
                raise UsageError(
                    f"this result has schema {raw['schema']}, and {SCHEMA} is the latest known: use a newer torchaos"
                )
            from torchaos.harness.record.plan import (
                made_as,  # imported here, because pydantic takes long to import
            )

            return made_as(cls, {"decided_by": _decided_by(raw), **raw})  # older results lack this field
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"this is not a result of torchaos: {error!r}") from error


def _decided_by(raw: Mapping[str, Any]) -> str:
    names = (case["name"] for case in raw["cases"] if case["verdict"] == raw["verdict"] != "passed")
    return next((name for name in names if raw["reason"].startswith(f"{name}: ")), "")


def _as_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return _as_json(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # "nan", "inf": JSON has no such numbers
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {_as_text(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_json(item) for item in value]
    return _as_text(value)


def _as_text(value: object) -> str:
    text = str(value.value) if isinstance(value, Enum) else str(value)
    return text.encode("utf-8", "backslashreplace").decode()
