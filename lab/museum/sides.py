"""One side of a row: plain code shows the bug, and then torchaos judges the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import oracle
from museum import TRAINERS, Bug, Side


@dataclass(frozen=True)
class Told:
    """The results of plain code and of torchaos for one side."""

    bug: str
    side: Side
    differs: bool  # according to plain code, a resumed run differs from an uninterrupted run
    shown: str  # where they differ, or the error with which the resume ended
    still: Sequence[str] = ()  # assertions that must fail with any version, as plain code shows
    verdict: str = ""
    reason: str = ""
    cases: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def is_shown(self) -> bool:
        """Whether plain code agrees with the row: the bug is there on the affected side, and gone on the other."""
        return self.differs == (self.side == "affected")

    def is_right(self, bug: Bug) -> bool:
        """Whether torchaos's verdict is right. The affected side must be failed by the assertion that the row names,
        with its words. The fixed side must be passed, or failed only by assertions that must fail according to the row
        and to plain code."""
        failed = {name for name, verdict in self.cases.items() if verdict == "failed"}
        if self.side == "affected":
            return self.verdict == "failed" and bug.failed in failed and bug.says in self.reasons[bug.failed]
        return self.verdict == "passed" or (self.verdict == "failed" and failed == bug.still.keys() == set(self.still))


def shown(bug: Bug, side: Side, packages: str) -> Told:
    """Runs the trainer's own proof, which is independent of torchaos: `--plain` prints, as JSON, what an uninterrupted
    run and a resumed run did, and which assertions must fail for another reason. Raises RuntimeError if it ends with an
    error that the row does not name."""
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, str(bug.script), "--plain", "--dir", scratch, *bug.args],
            env={**os.environ, "PYTHONPATH": f"{packages}:{TRAINERS}", "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    if done.returncode:
        if not bug.dies or bug.dies not in done.stderr:
            raise RuntimeError(f"{bug.name}, {side}: the trainer's own proof failed:\n{done.stderr[-2000:]}")
        return Told(bug.name, side, True, next(line for line in done.stderr.splitlines() if bug.dies in line))
    both = json.loads(done.stdout.strip().splitlines()[-1])
    where = difference(both["whole"], both["resumed"])
    return Told(bug.name, side, bool(where), where, both.get("still", []))


def difference(whole: list[object], resumed: list[object]) -> str:
    for place, (entry, other) in enumerate(zip(whole, resumed)):  # noqa: B905 (their lengths are compared below)
        if entry != other:
            return f"entry {place + 1} of {len(whole)}: {other} instead of {entry}"
    return "" if len(whole) == len(resumed) else f"{len(resumed)} entries instead of {len(whole)}"


def judged(bug: Bug, told: Told, packages: str, out: Path, keep: bool) -> Told:
    trainer = bug.job(told.side, packages)
    ran = oracle.run(trainer, oracle.shot(trainer, 0), out, keep)
    return replace(
        told, verdict=ran.verdict, reason=ran.reason, cases=ran.cases, reasons=ran.reasons, seconds=ran.seconds
    )


def read(path: Path) -> list[Told]:
    """All results of a bug's sides in the order in which they came. An incomplete line is ignored."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Told(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
