"""Describes a job that died before its first step was seen, by the last lines of its log."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchaos.harness.record.record import Record

_MOST_LINES, _LONGEST = 5, 200  # lines; characters of a line
_FAILED = re.compile(r"failed \(exitcode: ")  # torchelastic reports a failed rank; torchelastic's traceback follows
_LOGGED = re.compile(r'[EWI]\d{4} |\{"name": "torchelastic|\*{20}')  # torchrun's own lines


def died_at_start(run: Record) -> str:
    """A clause with the exit code and the last lines of the log. Empty if a step was seen, the job succeeded, or
    torchaos ended the job."""
    if run.history.executions or run.stopped or run.exit_code in (0, None):
        return ""
    codes = [code for attempt in run.history.attempts for code in attempt.exit_codes.values() if code]
    last_words = " | ".join(_last_words(run.log_end))
    ends = f"; its log ends with: {last_words}" if last_words else ""
    return f"the job died before its first step was seen (exit code {codes[0] if codes else run.exit_code}){ends}"


def _last_words(lines: Sequence[str]) -> list[str]:
    """The last lines of the last attempt's ranks, without torchrun's own lines and without repetitions."""
    ends = [place for place, line in enumerate(lines) if _FAILED.search(line)]
    begin = ends[-2] + 1 if len(ends) > 1 else 0
    own = lines[begin : ends[-1]] if ends else lines
    kept = dict.fromkeys(line.strip()[:_LONGEST] for line in own if line.strip() and not _LOGGED.match(line))
    return list(kept)[-_MOST_LINES:]
