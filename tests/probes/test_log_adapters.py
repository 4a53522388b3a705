"""Steps, losses and learning rates from the log lines of frameworks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.probes.log_adapters import AutoAdapter, LogStep, adapter_for

LOGS = Path(__file__).parent.parent / "data" / "logs"
SAID = {
    "torchtitan": [LogStep(1, 8.0403, None), LogStep(10, 7.12345, None)],
    "megatron": [LogStep(10, 10.53084, 2.5e-7), LogStep(20, 10.21511, 5e-7)],
    "nanogpt": [LogStep(0, 4.2654, None), LogStep(100, 2.4612, None)],
}


def read(name: str, wanted: object) -> list[LogStep]:
    adapter = adapter_for(wanted)  # type: ignore[arg-type]
    assert adapter is not None
    return [said for line in (LOGS / f"{name}.log").read_text().splitlines() if (said := adapter.read(line))]


@pytest.mark.parametrize("name", SAID)
def test_a_named_format(name: str) -> None:
    """The step lines of a framework are read, colours and other lines left out."""
    assert read(name, name) == SAID[name]


def test_hf_values_are_quoted_or_numbers() -> None:
    """HF Trainer prints no step; quoted values, numbers and nan are read, evaluation and summary are not."""
    first, second, third = read("hf", "hf")
    assert first == LogStep(None, 4.039, 1.333e-05)
    assert second == LogStep(None, 3.9712, 1.2e-05)
    assert third.loss is not None
    assert math.isnan(third.loss)


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "hf"])
def test_the_format_is_recognised(name: str) -> None:
    """Without a name the first format that fits is kept."""
    adapter = AutoAdapter()
    said = [one for line in (LOGS / f"{name}.log").read_text().splitlines() if (one := adapter.read(line))]
    assert adapter.name == name
    assert len(said) == len(read(name, name))


def test_plain_lines() -> None:
    """A loop that prints step and loss in its own way is understood; the learning rate is optional."""
    adapter = AutoAdapter()
    assert adapter.read("epoch 1 step 12 | loss 3.25 | lr 1e-3") == LogStep(12, 3.25, 1e-3)
    assert adapter.read("rank 0 Step=13, train_loss nothing, loss: 3.0") == LogStep(13, 3.0, None)
    assert adapter.read("no step here, loss 3") is None
    assert adapter.name == "plain"


def test_a_regex_of_the_users_own() -> None:
    """Named groups of any regular expression are read; thousands separators too."""
    adapter = adapter_for({"regex": r"it=(?P<step>[\d,]+) L=(?P<loss>\S+)"})
    assert adapter is not None
    assert (adapter.name, adapter.read("x it=1,200 L=0.5 y")) == ("regex", LogStep(1200, 0.5, None))
    assert adapter.read("it=3 L=oops") == LogStep(3, None, None)


def test_lightning_is_read_from_its_file() -> None:
    """There is nothing to read from the lines of a job that logs by Lightning."""
    assert adapter_for("lightning") is None


@pytest.mark.parametrize("wanted", ["megatrom", {"format": "x"}, {"regex": "("}, {"regex": "loss (.*)"}])
def test_bad_input_is_refused(wanted: object) -> None:
    """An unknown format, a broken expression and one without groups are each refused in one sentence."""
    with pytest.raises(UsageError, match=r"^job\.log"):
        adapter_for(wanted)  # type: ignore[arg-type]
