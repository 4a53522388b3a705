"""Describes a job that died by itself, before any fault: its own error, from the last lines of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.watching.probes.causes import CAUSES

_MOST_LINES, _LONGEST = 5, 200  # lines; characters of a line
_FAILED = re.compile(r"failed \(exitcode: ")  # torchelastic reports a failed rank; torchelastic's traceback follows
_LOGGED = re.compile(r'[EWI]\d{4} |\{"name": "torchelastic|\*{20}')  # torchrun's own lines
_RANK = re.compile(r"\[rank\d+\]:")  # torch writes it before each line of a traceback
_OF_OTHERS = [cause for cause in CAUSES if cause.whose == "another rank"]
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|SystemExit)(?::|$)")  # Python's last line


def died_by_itself(run: Record) -> str:
    """A clause with the exit code and the job's own error. Empty if the job succeeded, if torchaos ended the job, or if
    a fault was applied before."""
    if run.stopped or run.exit_code in (0, None) or any(run.of_kind(Kind.APPLYING, Kind.APPLIED)):
        return ""
    codes = [code for attempt in run.history.attempts for code in attempt.exit_codes.values() if code]
    last_words = " | ".join(_first_error(run.log_end))
    ends = f"; its log ends with: {last_words}" if last_words else ""
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
    own = [line for line in errors if not any(cause.pattern.search(line) for cause in _OF_OTHERS)] or errors
    return f"; the job's last error: {own[-1]}" if own else ""


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
    lines = [_RANK.sub("", line, count=1) for line in lines]
    return list(
        dict.fromkeys(
            line.strip()[:_LONGEST] for line in lines if line.strip() and not _LOGGED.match(line) and line.strip(" ^~")
        )
    )
