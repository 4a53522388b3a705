"""Lightning's CSV logger: `metrics.csv` with the columns epoch, step and what was logged. Lightning prints no losses.

A restart opens a folder of its own (version_0, version_1, ...). The logger appends rows and writes the whole file anew
when a column is added; rows never change, so a file is read again whenever it changed, and rows seen before are
skipped. `step` is Lightning's global_step, which counts from 0.
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
    """A probe over one file, or over every metrics.csv that is written below a folder from now on."""

    period_s = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since_s = time.time() - 1.0  # the clock of files is coarser
        self._seen: dict[Path, tuple[tuple[int, int], int]] = {}  # (size, mtime), rows read

    def sample(self, emit: Emit) -> None:
        for path in self._files():
            try:
                found = path.stat()
                stamp, (before, rows) = (found.st_size, found.st_mtime_ns), self._seen.get(path, ((0, 0), 0))
                if stamp == before or found.st_mtime < self._since_s:
                    continue
                said = list(read_metrics(path))
            except (OSError, UnicodeDecodeError, csv.Error):
                continue
            for one in said[rows:]:
                emit(Kind.LOG_STEP, {"step": one.step, "loss": one.loss, "lr": one.lr, "adapter": LIGHTNING})
            self._seen[path] = stamp, max(rows, len(said))

    def _files(self) -> list[Path]:
        if self._path.suffix == ".csv":
            return [self._path]
        folder = self._path
        return sorted([*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"), *folder.glob(f"*/*/{_NAME}")])


def read_metrics(path: Path) -> Iterator[LogStep]:
    """The rows with a training loss, in the order of the file. Raises OSError and csv.Error."""
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
