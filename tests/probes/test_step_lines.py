"""Lines of the shapes that training programs print, and the steps, losses and learning rates of training in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness.monitoring.probes.log_adapters import AutoAdapter, LogStep

SHAPES = yaml.load((Path(__file__).parents[1] / "data" / "logs" / "steps.yaml").read_text(), yaml.CSafeLoader)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda one: f"{one['program']}: {one['shows']}")
def test_what_is_read(shape: dict[str, Any]) -> None:
    """Without a format in the scenario, the numbers of training are read, and no others."""
    adapter = AutoAdapter()
    found = [said for line in shape["lines"] if (said := adapter.read(line))]
    assert repr(found) == repr([LogStep(*numbers) for numbers in shape["read"]])


def test_a_better_format_changes_the_mind() -> None:
    """A line in a program's own format counts more than one that only has the words step and loss."""
    adapter = AutoAdapter()
    assert adapter.read("step 0: loss 4.2") == LogStep(0, 4.2, None)
    assert adapter.read("iter 10: loss 3.1, time 26.54ms") == LogStep(10, 3.1, None)
    assert adapter.read("step 20: loss 4.2") is None
    assert adapter.name == "nanogpt"


def test_a_line_by_chance_is_not_the_format_for_ever() -> None:
    """Lines of another format that keep coming, and none of the present one, change the mind, too."""
    adapter = AutoAdapter()
    assert adapter.read("at step 100 with loss 2.5") == LogStep(100, 2.5, None)
    line = "{'loss': 2.25, 'learning_rate': 1e-05, 'epoch': 0.5}"
    read = [adapter.read(line) for _ in range(AutoAdapter.AGREED + 1)]
    assert read == [None] * (AutoAdapter.AGREED - 1) + [LogStep(None, 2.25, 1e-05)] * 2
    assert adapter.name == "hf"
