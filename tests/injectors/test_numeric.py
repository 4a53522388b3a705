"""Corruption in a rank: exactly the chosen bit of the chosen tensor changes, at the Moment."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from warm import PARENT

from torchaos.harness.protocol import wire
from torchaos.harness.protocol.agent_plan import AgentPlan, Moment, RankFault
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.running.launchers.job import BOOTSTRAP

INJECTORS = Path(__file__).parents[2] / "injectors"
TRAINER = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
dist.init_process_group("gloo", init_method="file://" + os.environ["FOLDER"] + "/store", rank=0, world_size=1)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.Adam(model.parameters())
for batch in DataLoader(torch.randn(72, 8), 6):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
# One step for each, from the least harmful bit on; the first of them is what the two runs are compared by.
FAULTS: dict[str, tuple[str, str, dict[str, Any], Phase | None]] = {
    "activation": ("numeric_bits", "Activation", {"bit": 20, "place": 0.5, "nth": 2}, Phase.FORWARD),
    "gradient": ("numeric_bits", "Gradient", {"bit": 20, "place": 0.2}, Phase.COLLECTIVE),
    "reduced": ("numeric_bits", "ReducedGradient", {"bit": 22, "place": 0.9}, Phase.OPTIMIZER),
    "moment": ("numeric_bits", "Moment", {"bit": 21, "place": 0.7}, None),
    "parameter": ("numeric_bits", "Parameter", {"bit": 31, "place": 0.3}, None),
    "scaled": ("numeric_byzantine", "ScaledGradient", {"factor": 4.0}, Phase.COLLECTIVE),
    "nan": ("numeric_bits", "Gradient", {"change": "nan", "bit": 0, "place": 0.0}, Phase.COLLECTIVE),
    "batch": ("data_corrupt", "CorruptBatch", {"samples": 2}, Phase.DATA),
}
FIRST = 4  # the step of the first fault


def run(folder: Path, faults: tuple[str, ...]) -> list[Event]:
    """The trainer as rank 0 of 1, with one fault a step from step 4 on."""
    (folder / "events").mkdir(parents=True)
    triggers = []
    for step, name in enumerate(faults, FIRST):
        module, injector, params, phase = FAULTS[name]
        page = folder / f"{name}.page"
        ControlPage(page, create=True).write(ControlPage.ALLOWED, 1)
        source = str(INJECTORS / f"{module}.py")
        triggers.append(RankFault(name, Moment(0, step, phase), str(page), source, injector, params, lease_s=60.0))
    hooks = ("steps", "loss", "samples", "state", "collectives")
    AgentPlan("run", str(folder / "events"), hooks, tuple(triggers)).write(folder / "plan.json")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    env = {
        **os.environ, **rank, "PYTHONPATH": str(BOOTSTRAP), "FOLDER": str(folder), wire.ENV_RUN_ID: "numeric",
        wire.ENV_PLAN: str(folder / "plan.json"), wire.ENV_ATTEMPT_BASE: "0", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    env.pop(wire.ENV_AGENT_PID, None)
    (folder / "script.py").write_text(TRAINER)
    process = PARENT.start(folder / "script.py", env, folder / "output.txt")
    said, _ = process.communicate(300)
    assert process.returncode == 0, said
    lines = [line for path in (folder / "events").glob("*.jsonl") for line in path.read_bytes().split(b"\n") if line]
    return sorted((Event.from_line(line) for line in lines), key=lambda event: event.seq)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Event]]:
    """Of a run with all faults, and of the same without."""
    folder = tmp_path_factory.mktemp("numeric")
    return {"faults": run(folder / "faults", tuple(FAULTS)), "none": run(folder / "none", ())}


def effects(events: list[Event]) -> dict[str, str]:
    return {event.data["fault"]: str(event.data["effect"]) for event in events if event.kind is Kind.EFFECT}


def test_each_lands_and_nothing_of_the_agent_fails(events: dict[str, list[Event]]) -> None:
    """Every fault tells of its effect, none of them is missed, and no hook was switched off."""
    told = effects(events["faults"])
    assert told.keys() == FAULTS.keys()
    bad = [event for event in events["faults"] if event.kind in (Kind.MISSED, Kind.AGENT_FAILED)]
    assert bad == [], [json.dumps(dict(event.data)) for event in bad]


@pytest.mark.parametrize("name", ["activation", "gradient", "reduced", "moment", "parameter"])
def test_the_very_bit_is_flipped(events: dict[str, list[Event]], name: str) -> None:
    """What was before and what is after differ in the bit that was asked for, and in no other."""
    before, after = effects(events["faults"])[name].rpartition(": ")[2].split(" became ")
    bits = [struct.unpack("<I", struct.pack("<f", float(number)))[0] for number in (before, after)]
    assert bits[0] ^ bits[1] == 1 << FAULTS[name][2]["bit"]


def test_the_check_sum_shows_it_from_that_step_on(events: dict[str, list[Event]]) -> None:
    """The parameters of both runs are the same up to the step before the first fault, and never after it."""
    sums = {
        which: [event.data["parameters"] for event in found if event.kind is Kind.STEP]
        for which, found in events.items()
    }
    assert len(sums["none"]) == 12
    same = [ours == theirs for ours, theirs in zip(sums["faults"], sums["none"], strict=True)]
    assert same == [True] * (FIRST - 1) + [False] * (12 - FIRST + 1)
    assert len(set(sums["none"])) == 12


def test_a_damaged_batch_is_still_that_of_the_data_set(events: dict[str, list[Event]]) -> None:
    """The samples of each step are those of the run without faults: the data set has them whole."""
    assert effects(events["faults"])["batch"] == "bit 31 of 16 numbers of a batch was flipped"
    digests = {
        which: [event.data["samples"] for event in found if event.kind is Kind.STEP] for which, found in events.items()
    }
    assert len(digests["none"]) == 12
    assert digests["faults"] == digests["none"]


def test_a_norm_that_cannot_be_right_is_told_at_once(events: dict[str, list[Event]]) -> None:
    """The NaN in the gradient is noted by the agent in its own step, and nothing is in the run without a fault."""
    notes = {
        which: [e.data for e in found if e.kind is Kind.NOTE and "norm" in e.data] for which, found in events.items()
    }
    assert notes["none"] == []
    assert any(note["norm"] != note["norm"] for note in notes["faults"])
