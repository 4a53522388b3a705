"""The page about the journal: all kinds of events with their data."""

from __future__ import annotations

from torchaos.harness.protocol import wire

from . import comments
from .markdown import code, doc, table

ABOUT = """# The events of the journal

This page lists every kind of event in a run's journal, with its payload. It is for engineers who read a journal by
program.

The journal is the files `events/*.jsonl` in the run directory: one JSON object per line, one writer per file. The
files are merged when they are read. Each line has this envelope:

{envelope}
`data` holds the payload, by kind. The keys below are always present; a line that lacks one of them is treated as
damaged. There may be other keys. Times are in seconds, sizes in bytes.

{kinds}
## Phases

{about_phases}

{phases}"""

ENVELOPE = {
    "kind": "the kind, below",
    "source": "the writer: the harness, a rank in one attempt, the reaper",
    "seq": "counts the events of one source",
    "wall_s": "seconds since the epoch",
    "mono_s": "`CLOCK_MONOTONIC`, comparable within one node",
    "rank": "the rank that it is about, or null",
    "attempt": "the attempt, from 0, or null",
    "step": "counted within the attempt, from 1, or null; global steps are made when the journal is read",
    "data": "the payload",
}


def events() -> str:
    said = comments.of_entries(wire, "PAYLOADS")
    rows = [
        (code(kind.value), ", ".join(code(key) for key in sorted(wire.FIELDS[kind])), said[kind.name])
        for kind in wire.Kind
    ]
    envelope = [(code(name), ENVELOPE[name]) for name in wire.Event.__dataclass_fields__]
    return ABOUT.format(
        envelope=table(["key", ""], envelope),
        kinds=table(["kind", "keys of the payload", ""], rows),
        about_phases=doc(wire.Phase) + " When each is entered: [how it works](../how-it-works.md).",
        phases="\n".join(f"- {code(phase.value)}" for phase in wire.Phase) + "\n",
    )
