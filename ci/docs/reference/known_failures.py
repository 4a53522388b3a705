"""The page of known failures: a row for each, from the table that reads logs."""

from __future__ import annotations

from torchaos.harness.monitoring.probes.known_failures import CAUSES

from .markdown import code, table

_HEAD = """# Known failures, one by one

This page lists the failures of torch, gloo, NCCL and CUDA, and of the machines under them, that torchaos recognises in
a job's log, and what helps. It is for engineers who find the name of one in a report;
[known failures](../known-failures.md) says what they change.

A failure that lies in *another rank* or *a signal* follows from something else, and is no defect.

"""


def known_failures() -> str:
    rows = (
        (code(one.name), one.whose, one.seen or "not known", ", ".join(one.issues) or "none known", one.advice)
        for one in CAUSES
    )
    return _HEAD + table(("name", "lies in", "seen with torch", "public issues", "what to do"), rows)
