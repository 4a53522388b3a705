"""Reads the file of Lightning's CSV logger: `metrics.csv` with the columns epoch, step and the logged values. Lightning
prints no losses.

Each restart opens a new folder (version_0, version_1, ...). The logger appends rows, and writes the whole file again
when a column is added. Rows never change, so a changed file is read again, and known rows are skipped. `step` is
Lightning's global_step, which counts from 0.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Emit
from torchaos.harness.watching.probes.log_adapters import LIGHTNING, LogStep

_NAME = "metrics.csv"


class MetricsFile:
    """A probe that reads one file, or, below a folder, each metrics.csv that is written from now on."""

    period_s = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since_s = time.time() - 1.0  # file times are coarser than the clock
        self._seen: dict[Path, tuple[tuple[int, int], int]] = {}  # (size, mtime), rows read

    def sample(self, emit: Emit) -> None:
        for path in self._files():
            try:
                found = path.stat()
                stamp, (before, rows) = (found.st_size, found.st_mtime_ns), self._seen.get(path, ((0, 0), 0))
                if stamp == before or found.st_mtime < self._since_s:
                    continue
                steps = list(read_metrics(path))
            except (OSError, UnicodeDecodeError, csv.Error):
                continue
            for step in steps[rows:]:
                emit(Kind.LOG_STEP, {"step": step.step, "loss": step.loss, "lr": step.lr, "adapter": LIGHTNING})
            self._seen[path] = stamp, max(rows, len(steps))

    def _files(self) -> list[Path]:
        if self._path.suffix == ".csv":
            return [self._path]
        folder = self._path
        return sorted([*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"), *folder.glob(f"*/*/{_NAME}")])


def read_metrics(path: Path) -> Iterator[LogStep]:
    """Yields the rows with a training loss, in the order of the file; an incomplete last line is left out. Raises
    OSError, UnicodeDecodeError and csv.Error."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(whole.splitlines()):
        loss = _value(row, lambda name: "loss" in name and not name.startswith(("val", "test")))
        step = row.get("step") or ""
        if loss is not None and step.isdigit():
            yield LogStep(int(step), loss, _value(row, lambda name: name.startswith("lr")))


def _value(row: Mapping[str, str | None], fits: Callable[[str], bool]) -> float | None:
    for name, text in row.items():
        try:
            if name and text and fits(name):
                return float(text)
        except ValueError:
            continue
    return None
