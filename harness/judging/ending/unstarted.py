"""Describes the error by which a job died: its own words, from the last lines of its log, and the known failure that
they show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.words import last_words_in_words
from torchaos.harness.watching.probes.causes import BY_NAME, cause_of
from torchaos.harness.watching.probes.log_adapters import without_ansi

_MOST_LINES, _LONGEST = 5, 200  # lines; characters of a line
_FAILED = re.compile(r"failed \(exitcode: ")  # torchelastic reports a failed rank; torchelastic's traceback follows
_LOGGED = re.compile(r'[EWI]\d{4} |\{"name": "torchelastic|\*{20}')  # torchrun's own lines
_RANK = re.compile(r"^(?:\s*(?:\[(?:rank|default)?\d+\]:|\d+: ))+")  # torch, --tee and srun write it before each line
_ERROR = re.compile(  # Python's last line
    r"(?:[\w.]*(?:Error|Exception|Interrupt)|[\w.]+(?:Exit|Timeout|Failure))(?::|$)"
)
_STEPS_AFTER = 2  # after a fatal error of one rank, the others may finish the steps under way


def last_words(run: Record) -> tuple[str, ...]:
    """The last lines of the log of a job that died by itself."""
    return tuple(map(_short, _first_error(run.log_end))) if died_by_itself(run) else ()


def died_by_itself(run: Record) -> str:
    """A clause with the exit code and the job's own error. Empty if the job succeeded, if torchaos ended the job, or if
    a fault was applied before."""
    if run.stopped or run.exit_code in (0, None) or any(run.of_kind(Kind.APPLYING, Kind.APPLIED)):
        return ""
    codes = [code for attempt in run.history.attempts for code in attempt.exit_codes.values() if code]
    ends = last_words_in_words([*map(_short, _first_error(run.log_end))])
    steps = run.history.executions
    when = (
        f"by itself after step {run.history.last_step}, before any fault" if steps else "before its first step was seen"
    )
    return f"the job died {when} (exit code {codes[0] if codes else run.exit_code}){ends}"


def last_error(run: Record) -> str:
    """The last exception that a failed job wrote to its log, as a clause. Empty if there is no exception. An exception
    that only says that another rank is gone is named only if there is no other."""
    if run.stopped or run.exit_code in (0, None):
        return ""
    errors = [line for line in _kept(_attempts(run.log_end)[-1]) if _ERROR.match(line)]
    own = [line for line in errors if not _is_consequence(line)] or errors
    return f"; the job's last error: {_short(own[-1])}" if own else ""


def cause_of_end(run: Record, attempt: int) -> str:
    """The known failure with which an attempt ended, by name: the last one in its log that it did not survive. One that
    only follows from something else is named only if there is no other. Empty if there is none, or if the job's last
    attempt ended with another error."""
    found = [e for e in run.of_kind(Kind.LOG_CAUSE) if e.attempt in (attempt, None) and not survived(run, e)]
    names = [str(event.data["cause"]) for event in found]
    own = [name for name in names if (known := BY_NAME.get(name)) is None or not known.is_consequence]
    name = (own or names or [""])[-1]
    is_last = bool(run.history.attempts) and attempt == run.history.attempts[-1].number
    return "" if is_last and _ends_otherwise(run, name, attempt) else name


def survived(run: Record, cause: Event) -> bool:
    """Whether the job went on with its steps after this line of its log."""
    after = run.history.executions.of_attempt(cause.attempt or 0).after(cause.mono_s)
    return len(set(after.local_step.tolist())) > _STEPS_AFTER


def _ends_otherwise(run: Record, name: str, attempt: int) -> bool:
    """Whether the log ends with an error that is no known failure, after the last line that shows `name`. A line that
    only follows from something else may come before that error, or after it."""
    last = None
    for line in _kept(_attempts(run.log_end)[-1]):
        cause = cause_of(line, attempt)
        if cause is None and _ERROR.match(line):
            last = line
        elif cause is not None and cause.name == name and not cause.is_consequence:
            last = None
    return last is not None


def _first_error(lines: Sequence[str]) -> list[str]:
    """The last lines of the first attempt that shows an error, because the errors of later attempts may follow from it.
    If no attempt shows an error: the last lines of the last attempt."""
    found = [_own(part) for part in _attempts(lines)]
    return next((words for words in found if words and _ERROR.match(words[-1])), found[-1])


def _attempts(lines: Sequence[str]) -> list[Sequence[str]]:
    """The lines that the ranks wrote before each failure. If torchelastic reports no failure, all lines."""
    ends = [place for place, line in enumerate(lines) if _FAILED.search(line)]
    return [lines[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)] or [lines]


def _own(lines: Sequence[str]) -> list[str]:
    """The last lines up to the last error, without torchrun's own lines and without lines that several ranks repeat."""
    kept = _kept(lines)
    last = max((place for place, line in enumerate(kept) if _ERROR.match(line)), default=len(kept) - 1)
    return kept[: last + 1][-_MOST_LINES:]


def _kept(lines: Sequence[str]) -> list[str]:
    """The lines without torchrun's own lines, and without lines that several ranks repeat."""
    lines = [_RANK.sub("", without_ansi(line)) for line in lines]
    return list(
        dict.fromkeys(line.strip() for line in lines if line.strip() and not _LOGGED.match(line) and line.strip(" ^~"))
    )


def _is_consequence(line: str) -> bool:
    cause = cause_of(line, 0)
    return cause is not None and cause.is_consequence


def _short(line: str) -> str:
    """The line without its middle, if it is long: the end may be the part of a path that says which checkpoint it is.
    It is cut at the ends of words and of parts of a path."""
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    begin, end = re.match(rf".{{,{half}}}(?=[\s/])", line), re.search(rf"[\s/].{{,{half}}}$", line)
    return f"{begin[0] if begin else line[:half]} ... {end[0].strip() if end else line[-half:]}"
