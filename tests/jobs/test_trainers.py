"""How ordinary trainers behave when a rank is killed: the ground truth for the tests that judge them."""

from __future__ import annotations

import csv
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

import pytest

pytestmark = pytest.mark.job
Run = Callable[..., Any]


def trainer(run_job: Run, name: str, folder: Path, when: Callable[[str, Path], bool] | None = None) -> Any:
    """The trainer's run, which must end well."""
    package = {"hf": "transformers"}.get(name, name)
    if package != "plain" and find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed; `make setup` installs it")
    script = "plain_ddp" if name == "plain" else f"{name}_trainer"
    ran = run_job(f"tests/trainers/{script}.py", folder, "--steps", "20", "--dir", str(folder), when=when)
    assert ran.exit_code == 0, ran.log
    return ran


def after(count: int, pattern: str) -> Callable[[str, Path], bool]:
    return lambda log, _: len(re.findall(pattern, log)) >= count


def test_plain_ddp(run_job: Run, bitwise: Run, tmp_path: Path) -> None:
    """The plain loop puts everything back: its losses don't change by a bit."""
    reference = trainer(run_job, "plain", tmp_path / "reference")
    ran = trainer(run_job, "plain", tmp_path / "run", after(13, r"step \d+ loss"))
    bitwise(ran, reference)


@pytest.mark.long
def test_hf_trainer(run_job: Run, tmp_path: Path) -> None:
    """Transformers puts everything back: the losses that it prints don't change."""
    line = r"'loss': '?([\d.]+)'?.*?'epoch': '?([\d.]+)"
    reference = trainer(run_job, "hf", tmp_path / "reference")
    ran = trainer(run_job, "hf", tmp_path / "run", after(13, line))
    expected = {epoch: loss for loss, epoch in re.findall(line, reference.log)}
    assert len(expected) >= 20
    printed = {epoch: loss for loss, epoch in re.findall(line, ran.log)}
    assert {epoch: printed[epoch] for epoch in expected} == expected


def rows(folder: Path) -> list[tuple[int, str]]:
    """Step and loss from Lightning's CSV files, one for each attempt; the last line may be half written."""
    return [
        (int(row["step"]) + 1, row["train_loss"])
        for path in sorted(folder.glob("lightning_logs/*/metrics.csv"))
        for row in csv.DictReader(path.read_text().splitlines())
        if row.get("train_loss") and row["step"].isdecimal()
    ]


@pytest.mark.long
def test_lightning(run_job: Run, tmp_path: Path) -> None:
    """Lightning goes on at the right step with other losses: it keeps neither the RNG nor the place in the epoch."""
    reference = trainer(run_job, "lightning", tmp_path / "reference")
    ran = trainer(run_job, "lightning", tmp_path / "run", lambda _, folder: len(rows(folder)) >= 13)
    expected, got = dict(rows(reference.folder)), rows(ran.folder)
    resumed = next(number for number in range(1, len(got)) if got[number][0] <= got[number - 1][0])
    assert got[resumed][0] in (6, 11)
    assert max(expected) == max(dict(got)) == 20
    assert all(expected[step] == loss for step, loss in got[:resumed])
    assert all(expected[step] != loss for step, loss in got[resumed:])


@pytest.mark.long
def test_accelerate(run_job: Run, tmp_path: Path) -> None:
    """Accelerate goes on at the right step and sample with other dropout: starting the loader draws from the RNG."""
    reference = trainer(run_job, "accelerate", tmp_path / "reference")
    ran = trainer(run_job, "accelerate", tmp_path / "run", after(13, r"step \d+ loss"))
    expected = dict(reference.losses)
    resumed = next(number for number in range(1, 99) if ran.losses[number][0] <= ran.losses[number - 1][0])
    assert ran.losses[resumed][0] == 11
    assert all(expected[step] == loss for step, loss in ran.losses[:resumed])
    assert all(expected[step] != loss for step, loss in ran.losses[resumed:])
    assert len(dict(ran.losses)) == 20
