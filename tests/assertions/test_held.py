"""checkpoint_integrity: whether a checkpoint holds the parameters that this run had at the checkpoint's step. In every
case the twin's checkpoints are the same as the run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.checkpoint_integrity import CheckpointIntegrity
from torchaos.harness.interfaces import Finding, Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import number_in_name
from torchaos.harness.record.record import Record

STEPS = (5, 10, 15, 20, 25, 30)
NAMES = ("net.weight", "net.bias", "out.weight")
AVERAGE = 500  # what is added to a sum: that of no step
Sums = Mapping[str, int]


def _sums(step: int, more: int = 0) -> dict[str, int]:
    return {name: 1000 * step + place + more for place, name in enumerate(NAMES)}


def _kind(name: str) -> str:
    return "float32 4" if name.endswith("bias") else "float32 4x4"


def _one(path: str, step: int | None, sums: Sums, kinds: Mapping[str, str] | None = None) -> dict[str, Any]:
    kinds = {name: _kind(name) for name in sums} if kinds is None else kinds
    return {
        "path": path, "format": "dir", "step": step, "complete": True, "loadable": True, "problem": None,
        "tensors": {name: f"{total}" for name, total in sums.items()}, "values": {}, "bytes": 10,
        "sketches": {name: [total] for name, total in sums.items()}, "kinds": kinds,
    }  # fmt: skip


def _file(sums: Sums, prefix: str = "model.pt:model.") -> dict[str, int]:
    return {prefix + name: total for name, total in sums.items()}


def _told(run: Record, parts: bool = False, copies: bool = False) -> Record:
    """With what the agent tells as each save begins. `parts`: each rank has one of each parameter; `copies`: the ranks
    have the same one, which is the whole."""
    events = list[Event]()
    for event in run.events:
        events.append(event)
        step = number_in_name(str(event.data.get("path"))) if event.kind is Kind.SAVE_BEGIN else None
        if step is not None:
            sums = {
                name: f"part0-{total:016x}" if copies else _sum(total, event.rank or 0, parts)
                for name, total in _sums(step).items()
            }
            told = {"parameters": {name: [_kind(name), one] for name, one in sums.items()}}
            events.append(replace(event, kind=Kind.KEPT, seq=event.seq + 10**6, mono_s=event.mono_s + 1e-6, data=told))
    return replace(run, events=tuple(events))


def _sum(total: int, rank: int, parts: bool) -> str:
    return f"shard-{_part(total, rank):016x}" if parts else f"{total:016x}"


def _part(total: int, rank: int) -> int:
    return total // 4 if rank == 0 else total - total // 4


def _judge(trainer: Any, checkpoints: Sequence[dict[str, Any]], kills: Any = ((18, 1),), **how: Any) -> Finding:
    inventory = {"root": "/job/checkpoints", "checkpoints": list(checkpoints)}
    run, twin = trainer(kills=kills).record(inventory=inventory), trainer().record(inventory=inventory)
    return CheckpointIntegrity().judge(_told(run, **how), [_told(twin, **how)])


def _checkpoints(last: Sums, *more: dict[str, Any], prefix: str = "model.pt:model.") -> list[dict[str, Any]]:
    """Those of all steps; the last one holds `last` as it stands."""
    usual = [_one(f"step-{step}", step, _file(_sums(step), prefix)) for step in STEPS[:-1]]
    return [*usual, _one("step-30", 30, last), *more]


def test_the_parameters_of_its_step_pass(trainer: Any) -> None:
    """Under whatever name a file nests them, and with what wrappers add."""
    for prefix in ("model.pt:model.", "", "x/y.safetensors:", "module.", "a.pt:state._orig_mod."):
        finding = _judge(trainer, _checkpoints(_file(_sums(30), prefix), prefix=prefix))
        assert (finding.outcome, finding.measured["with_own_parameters"]) == (Outcome.PASSED, 6), finding.reason


def test_those_of_another_step_are_failed(trainer: Any) -> None:
    """A stale copy under the name of a later step, also of one parameter alone: it says of which step it is."""
    finding = _judge(trainer, _checkpoints(_file(_sums(25))))
    assert finding.outcome is Outcome.FAILED
    assert finding.reason == (
        "step-30 (step 30) is whole, and holds the parameters of step 25, not those of step 30: net.weight and 2 others"
    )
    alone = _judge(trainer, _checkpoints(_file({**_sums(30), "net.bias": _sums(10)["net.bias"]})))
    assert (alone.outcome, alone.reason.endswith("of step 10, not those of step 30: net.bias")) == (
        Outcome.FAILED,
        True,
    )


def test_those_of_no_step_are_failed(trainer: Any) -> None:
    """An average in place of the weights, in a checkpoint that the job resumes from. Where no resume was seen, nobody
    knows what it is for."""
    average = _checkpoints(_file(_sums(30, AVERAGE)))
    finding = _judge(trainer, average)
    assert (finding.outcome, "of no step that was seen, instead of those of step 30" in finding.reason) == (
        Outcome.FAILED, True,
    )  # fmt: skip
    assert _judge(trainer, average, kills=()).outcome is not Outcome.FAILED


def test_another_parameter_in_its_place_is_failed(trainer: Any) -> None:
    """One of the same shape: a file of another rank's, say."""
    finding = _judge(trainer, _checkpoints(_file({**_sums(30), "out.weight": _sums(30)["net.weight"]})))
    assert (finding.outcome, "holds net.weight in place of another parameter: out.weight" in finding.reason) == (
        Outcome.FAILED, True,
    )  # fmt: skip


def test_a_parameter_that_only_the_others_have_is_failed(trainer: Any) -> None:
    """Where all other checkpoints of its kind hold it. An average of it is no substitute."""
    last = {**_file(_sums(30)), **_file(_sums(30, AVERAGE), "model.pt:ema.")}
    del last["model.pt:model.out.weight"]
    finding = _judge(trainer, _checkpoints(last))
    assert (finding.outcome, finding.reason.endswith("of its kind hold: out.weight")) == (Outcome.FAILED, True)


def test_a_part_that_is_there_twice_is_failed(trainer: Any) -> None:
    """Each rank writes its part of every parameter; in the last checkpoint both are rank 0's. The whole, put together
    from the parts, is right."""

    def parts(step: int, *ranks: int) -> dict[str, Any]:
        sums = {
            f"part-{place}.pt:{name}": _part(total, rank)
            for place, rank in enumerate(ranks)
            for name, total in _sums(step).items()
        }
        return _one(f"step-{step}", step, sums, dict.fromkeys(sums, "float32 2x4"))

    usual = [parts(step, 0, 1) for step in STEPS[:-1]]
    assert _judge(trainer, [*usual, parts(30, 0, 1)], parts=True).measured["with_own_parameters"] == 6
    finding = _judge(trainer, [*usual, parts(30, 0, 0)], parts=True)
    assert (finding.outcome, "another rank's part twice, and not that of rank 1" in finding.reason) == (
        Outcome.FAILED, True,
    )  # fmt: skip
    whole = _judge(trainer, _checkpoints(_file(_sums(30))), parts=True)
    assert (whole.outcome, whole.measured["with_own_parameters"]) == (Outcome.PASSED, 6)
    copied = _judge(trainer, _checkpoints(_file(_sums(30))), copies=True)  # a mesh of fewer dimensions than the job's
    assert (copied.outcome, copied.measured["with_own_parameters"]) == (Outcome.PASSED, 6), copied.reason
    stale = _judge(trainer, _checkpoints(_file(_sums(20))), parts=True)
    assert (stale.outcome, "of step 20" in stale.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize(
    "beside",
    [
        _one("ema/step-30.pt", 30, _file(_sums(30, AVERAGE))),
        _one("best.pt", 30, _file(_sums(20))),
        _one("half/step-30.pt", 30, _file(_sums(30, AVERAGE)), dict.fromkeys(_file(_sums(30)), "bfloat16 4x4")),
        _one("export.pt", 30, _file(_sums(30, AVERAGE))),
    ],
    ids=["average", "best", "half", "export"],
)  # fmt: skip
def test_what_lies_beside_is_not_judged(trainer: Any, beside: dict[str, Any]) -> None:
    """Averages, the best model, casts, exports: no resume reads them."""
    finding = _judge(trainer, _checkpoints(_file(_sums(30)), beside))
    assert finding.outcome is Outcome.PASSED, finding.reason


@pytest.mark.parametrize(
    "last",
    [
        {**_file(_sums(30)), **_file(_sums(30, AVERAGE), "model.pt:ema.")},
        {**_file(_sums(30)), **_file(_sums(25), "model.pt:target.")},
        _file(_sums(30, AVERAGE), "model.pt:ema."),
        _file(_sums(30, AVERAGE), "model.pt:model.lora_"),
    ],
    ids=["with an average", "with a target network", "an average alone", "other names"],
)
def test_other_tensors_of_like_names_are_borne_with(trainer: Any, last: dict[str, int]) -> None:
    """Within a checkpoint that the job resumes from."""
    finding = _judge(trainer, _checkpoints(last))
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_another_type_or_shape_is_no_parameter(trainer: Any) -> None:
    """Casts, and parts of which nobody knows the sum."""
    last = _one("step-30", 30, _file(_sums(30, AVERAGE)), dict.fromkeys(_file(_sums(30)), "bfloat16 4x4"))
    finding = _judge(trainer, [*_checkpoints(_file(_sums(30)))[:-1], last])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_a_copy_that_is_written_a_step_late_passes(trainer: Any) -> None:
    """The sums were taken a step later than the state that it holds, and it says of which step it is."""
    finding = _judge(trainer, [_one(f"step-{step}", step - 1, _file(_sums(step - 1))) for step in STEPS])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_without_sums_nothing_is_said(trainer: Any) -> None:
    """An older journal, or a job without an optimizer of torch's."""
    inventory = {"root": "/job/checkpoints", "checkpoints": _checkpoints(_file(_sums(25)))}
    run, twin = trainer(kills=((18, 1),)).record(inventory=inventory), trainer().record(inventory=inventory)
    finding = CheckpointIntegrity().judge(run, [twin])
    assert (finding.outcome, "own" in finding.measured) == (Outcome.PASSED, False)
