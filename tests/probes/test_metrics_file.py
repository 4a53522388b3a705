"""Lightning's metrics.csv."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchaos.harness.monitoring.probes.job_log import MetricsFile, read_metrics
from torchaos.harness.monitoring.probes.log_adapters import LogStep
from torchaos.harness.protocol.wire import Event, Kind

SAMPLE = Path(__file__).parent.parent / "data" / "logs" / "lightning-metrics.csv"


def sample(probe: MetricsFile) -> list[tuple[int, float]]:
    said = []

    def emit(kind: Kind, data: Mapping[str, Any]) -> Event:
        said.append((data["step"], data["loss"]))
        return Event(kind, "test", 0, 0.0, 0.0, data=data)

    probe.sample(emit)
    return said


def test_training_rows_are_read() -> None:
    """Rows with a training loss are taken, validation rows are not."""
    assert list(read_metrics(SAMPLE)) == [LogStep(4, 6.838, 0.001), LogStep(9, 6.102, 0.0009)]


def test_each_row_is_told_once(tmp_path: Path) -> None:
    """New rows are told as they come, a torn last row waits, and a restart's own folder is found."""
    probe = MetricsFile(tmp_path)
    assert sample(probe) == []
    first = tmp_path / "version_0" / "metrics.csv"
    first.parent.mkdir()
    shutil.copyfile(SAMPLE, first)
    assert sample(probe) == [(4, 6.838), (9, 6.102)]
    assert sample(probe) == []
    with first.open("a") as file:
        file.write("0,,14,5.5,\n0,,19,5")
    assert sample(probe) == [(14, 5.5)]
    second = tmp_path / "version_1" / "metrics.csv"
    second.parent.mkdir()
    second.write_text("epoch,step,train_loss\n0,9,6.0\n")
    assert sample(probe) == [(9, 6.0)]


def test_a_file_that_was_written_anew_gives_its_new_rows(tmp_path: Path) -> None:
    """The logger rewrites the file when a column is added; rows that were told are not told again."""
    path = tmp_path / "metrics.csv"
    probe = MetricsFile(path)
    path.write_text("step,loss\n1,3.0\n")
    assert sample(probe) == [(1, 3.0)]
    path.write_text("step,loss,lr\n1,3.0,\n2,2.0,0.1\n")
    assert sample(probe) == [(2, 2.0)]
