"""checkpoint_integrity: values that count restarts or give the time of the save, and values that only look like
these."""

from __future__ import annotations

from typing import Any

import pytest

from torchaos.assertions.checkpoint_integrity import CheckpointIntegrity
from torchaos.harness.analysis.checkpointing.checkpoint_contents import Clash
from torchaos.harness.analysis.checkpointing.checkpoint_diff import may_be_a_clock
from torchaos.harness.interfaces import Finding, Outcome

KILLED_IN = 18
STEPS = (5, 10, 15, 20, 25, 30)


def _inventory(values: dict[int, dict[str, str]]) -> dict[str, Any]:
    """`values`: beside the step's own, by step."""
    found = [
        {
            "path": f"step-{step}", "format": "dir", "step": step, "complete": True, "loadable": True, "problem": None,
            "tensors": {"weight": f"w{step}"}, "values": {"step": str(step), **values.get(step, {})}, "bytes": 10,
        }
        for step in STEPS
    ]  # fmt: skip
    return {"root": "/job/checkpoints", "checkpoints": found}


def _judge(trainer: Any, ours: dict[int, dict[str, str]], *theirs: dict[int, dict[str, str]]) -> Finding:
    run = trainer(kills=[(KILLED_IN, 1)]).record(inventory=_inventory(ours))
    return CheckpointIntegrity().judge(run, [trainer().record(inventory=_inventory(one)) for one in theirs])


def _in(steps: tuple[int, ...], **values: str) -> dict[int, dict[str, str]]:
    return {step: {name.replace("__", "."): value for name, value in values.items()} for step in steps}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"diary__incarnation": "2"}, {"diary__incarnation": "1"}),
        ({"launch_count": "1"}, {"launch_count": "0"}),
        ({"lineage__0__resumed_at": "15", "lineage__0__by": "'me'"}, {}),
        ({"meta__restarts__0": "15"}, {}),
    ],
    ids=["from one", "from none", "a list", "a list of numbers"],
)
def test_what_restarts_make_of_it_is_no_loss(trainer: Any, ours: dict[str, str], theirs: dict[str, str]) -> None:
    """A number that is larger by one after one restart, and a line more of a list."""
    finding = _judge(trainer, _in((20, 25, 30), **ours), _in((20, 25, 30), **theirs))
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "which show the restart" in finding.reason


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"diary__incarnation": "3"}, {"diary__incarnation": "1"}),
        ({"diary__incarnation": "1"}, {"diary__incarnation": "2"}),
        ({"stopping__bad": "1"}, {"stopping__bad": "0"}),
        ({"stopping__bad": "0"}, {"stopping__bad": "1"}),
        ({"history__0__loss": "0.5"}, {}),
        ({}, {"lineage__0__at": "15"}),
    ],
    ids=["too many", "fewer", "a bad evaluation more", "a counter that starts anew", "another list", "a lost list"],
)  # fmt: skip
def test_what_only_looks_so_is_failed(trainer: Any, ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Another name, or another number than a restart makes."""
    finding = _judge(trainer, _in((20, 25, 30), **ours), _in((20, 25, 30), **theirs))
    assert (finding.outcome, "ignore: [" in finding.reason) == (Outcome.FAILED, True), finding.reason


def test_the_place_that_a_model_was_loaded_from_is_no_loss(trainer: Any) -> None:
    """Libraries of Hugging Face save it. After a resume it is a checkpoint of the run, and in the twin it is lacking or
    another place. A path outside the checkpoints, or another name, is failed."""

    def judge(ours: dict[str, str], theirs: dict[str, str]) -> Outcome:
        return _judge(trainer, _in((20, 25, 30), **ours), _in((20, 25, 30), **theirs)).outcome

    place = "'/job/checkpoints/step-15/ema'"
    assert judge({"config__json:_name_or_path": place}, {}) is Outcome.PASSED
    assert judge({"config__json:_name_or_path": place}, {"config__json:_name_or_path": "'gpt2'"}) is Outcome.PASSED
    assert judge({"config__json:_name_or_path": "'/elsewhere'"}, {}) is Outcome.FAILED
    assert judge({"config__json:best": place}, {}) is Outcome.FAILED


def test_what_differed_before_any_fault_is_noise(trainer: Any) -> None:
    """A process id, with one twin alone. What differs only since the fault is failed."""
    always = _judge(trainer, _in(STEPS, pid="4711"), _in(STEPS, pid="815"))
    assert always.outcome is Outcome.PASSED, always.reason
    assert "except 1 entry in which the twins differ from each other, or from this run before" in (always.reason)
    since = _judge(trainer, _in((20, 25, 30), pid="4711"), _in((20, 25, 30), pid="815"))
    assert since.outcome is Outcome.FAILED
    number = _judge(
        trainer, {**_in(STEPS, best="0.50001"), **_in((30,), best="0.9")}, _in(STEPS, best="0.5")
    )  # its noise has a size, and this is far more
    assert number.outcome is Outcome.FAILED, number.reason


def test_the_time_of_a_save_has_no_size(trainer: Any) -> None:
    """Two twins that were made a minute apart, and a run of a month later."""
    saved = ("1700000000.5", "1697000000.5", "1697000060.5")
    finding = _judge(trainer, *(_in((20, 25, 30), saved=one) for one in saved))
    assert (finding.outcome, "except 1 entry" in finding.reason) == (Outcome.PASSED, True), finding.reason
    assert not may_be_a_clock(Clash(5, "a", "value", "tokens", "1700000000", "12"))
    assert not may_be_a_clock(Clash(5, "a", "tensor", "time_embedding", "1700000000", "1700000001"))
