"""Whether the claims of a verdict (harness/analysis/claims.py) are true of a simulated trainer (worlds.py), of whose
state it is known which parts were not restored: no cause may name a part that was restored, and no part that was not
restored may be called equal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torchaos.harness.analysis.claims import CLAIMS

WEIGHTS, FROZEN, BUFFERS, MOMENTS = "weights", "frozen", "buffers", "moments"
COUNTER, SCHEDULE, RATE, GENERATORS = "counter", "schedule", "rate", "generators"
DATA, SCALE, SKIPS, HIDDEN = "data", "scale", "skips", "hidden"

# The part that each field of the simulated state belongs to.
PARTS = {
    "weights": WEIGHTS, "frozen": FROZEN, "buffer": BUFFERS, "moments": MOMENTS, "opt_step": COUNTER,
    "sched_step": SCHEDULE, "rate": RATE, "draws": GENERATORS, "position": DATA, "turn": DATA, "scale": SCALE,
    "good": SKIPS, "hidden": HIDDEN,
}  # fmt: skip
_ALWAYS = {COUNTER, SCHEDULE, RATE, DATA}  # these are recorded with each step
RECORDED = {
    "named": {*_ALWAYS, WEIGHTS, FROZEN, BUFFERS, MOMENTS, GENERATORS},
    "all": {*_ALWAYS, WEIGHTS, FROZEN, BUFFERS, MOMENTS, GENERATORS},
    "steps": {*_ALWAYS, WEIGHTS, MOMENTS}, "none": _ALWAYS,
}  # fmt: skip

# Claims that are true only if one of these parts was not restored.
TRUE_IF: Mapping[str, Collection[str]] = {
    "weights": {WEIGHTS}, "weights of the save": {WEIGHTS}, "frozen": {FROZEN}, "buffers": {BUFFERS},
    "buffers in forward": {BUFFERS}, "moments": {MOMENTS}, "rng": {GENERATORS}, "rng exchanged": {GENERATORS},
    "rng other": {GENERATORS}, "optimizer counter": {COUNTER}, "optimizer apart": {COUNTER},
    "schedule": {SCHEDULE}, "schedule apart": {SCHEDULE}, "rate": {RATE}, "learning rate": {RATE, SCHEDULE},
    "rate kept": {RATE, SCHEDULE}, "rate constant": {RATE, SCHEDULE}, "rates apart": {RATE},
    "rates other": {RATE, SCHEDULE}, "rates anew": {SCHEDULE}, "rates ahead": {SCHEDULE}, "rates later": {SCHEDULE},
    "rates behind": {SCHEDULE}, "rates one behind": {SCHEDULE}, "loss scale": {SCALE}, "skips": {SKIPS},
    "dropped": {SKIPS}, "skipped here": {SKIPS}, "skipped there": {SKIPS}, "data": {DATA}, "data rewound": {DATA},
    "data anew": {DATA}, "sampler anew": {DATA},
    "data made": {*PARTS.values()},  # of what the job makes it from
}  # fmt: skip
# Nothing of this kind happens in these worlds.
NEVER = (
    "accumulation", "turn", "loaded here", "loaded there", "contents", "samples altered", "rest",
    "no load", "fault or job", "fault", "other replicas", "batch divided", "some inputs", "waits for ever", "trained",
)  # fmt: skip
UNRECORDED = ("not recorded", "gradients", "update", "acts later")  # something that no record shows was not restored
_QUANTITIES = {
    "weights at the start": WEIGHTS, "parameters": WEIGHTS, "frozen parameters": FROZEN, "buffers": BUFFERS,
    "optimizer's moments at the start": MOMENTS, "moments": MOMENTS, "RNG states": GENERATORS,
    "optimizer counter": COUNTER,
}  # fmt: skip


def false_claims(text: str, state: str, fields: Collection[str]) -> Iterator[str]:
    """Yields the claims in the text that are not true. `state`: what was recorded (see worlds.py); `fields`: the fields
    of the simulated state that were not restored."""
    differs = {PARTS[field] for field in fields}
    for name, pattern in _PATTERNS.items():
        for found in pattern.finditer(text):
            of = differs - RECORDED[state] if name in UNRECORDED else {*TRUE_IF.get(name, ())} & differs
            if not of:
                yield f"{name}: {found.group()}"
    for found in _EQUAL.finditer(text):
        told = re.split(r", (?:and )?| and ", found.group(1))
        yield from (f"equal: {each}" for each in told if _QUANTITIES.get(each) in differs)


def _pattern(words: str) -> re.Pattern[str]:
    return re.compile(".*?".join(map(re.escape, re.split(r"\{[^}]*\}", words))))


_PATTERNS = {name: _pattern(CLAIMS[name].words) for name in (*TRUE_IF, *NEVER, *UNRECORDED)}
_EQUAL = re.compile(r"(?:[,;] |^)([^;:.]*?) (?:are bit for bit as before|(?:is|are) equal)", re.MULTILINE)
_PATTERNS["moments"] = re.compile(r"the optimizer's [^:;.]* were not restored: ")
