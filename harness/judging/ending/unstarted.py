"""A job that died before anybody saw a step of it: what it said last. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchaos.harness.record.record import Record

_MOST_LINES, _LONGEST = 5, 200  # characters of a line
_FAILED = re.compile(r"failed \(exitcode: ")  # torchelastic, of a rank; its own traceback follows
_LOGGED = re.compile(r'[EWI]\d{4} |\{"name": "torchelastic|\*{20}')  # torchrun's own lines


def died_at_start(run: Record) -> str:
    """A clause with the exit code and the last lines of the log; empty where a step was seen, or the job ended well or
    was ended."""
    if run.history.executions or run.stopped or run.exit_code in (0, None):
        return ""
    codes = [code for attempt in run.history.attempts for code in attempt.exit_codes.values() if code]
    told = " | ".join(_last_words(run.log_end))
    ends = f"; its log ends with: {told}" if told else ""
    return f"the job died before its first step was seen (exit code {codes[0] if codes else run.exit_code}){ends}"


def _last_words(lines: Sequence[str]) -> list[str]:
    """What the ranks of the last attempt said, without what torchrun adds, and each line once."""
    ends = [place for place, line in enumerate(lines) if _FAILED.search(line)]
    begin = ends[-2] + 1 if len(ends) > 1 else 0
    own = lines[begin : ends[-1]] if ends else lines
    said = dict.fromkeys(line.strip()[:_LONGEST] for line in own if line.strip() and not _LOGGED.match(line))
    return list(said)[-_MOST_LINES:]
