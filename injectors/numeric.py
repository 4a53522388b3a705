"""The common part of the `numeric.*` injectors: silent corruption of one number in the tensors of a training step."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar

from torchaos.plugin import Evidence, Fault, Irreversible, Kind, NodeSite, RankSite, Record, Target
from torchaos.plugin.evidence import broke_off, died, seen_by_others, seen_by_twin
from torchaos.plugin.families.ranks import Call, as_integers, local

Change = Literal["flip", "nan", "inf", "zero"]
Self = TypeVar("Self")
_REFUSALS = range(1, 128)  # exit codes of a rank that ends itself with an error
_VALUES = {"nan": float("nan"), "inf": float("inf"), "zero": 0.0}


class Corruption(Fault):
    """Changes one number. `change`: the kind of change. `bit`: the number of the bit, counted from the least
    significant. `place`: the position in the tensors, from 0 (first number) to 1 (last number). If `bit` or `place` is
    None, it is drawn from the seed."""

    where = ("rank",)
    needs = frozenset({"agent"})
    hooks: ClassVar[tuple[str, ...]] = ("state",)

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        drawn = {"bit": draw.randrange(32), "place": round(draw.random(), 6)}
        given = {name: value for name, value in vars(self).items() if name in drawn and value is not None}
        return replace(self, **{**drawn, **given})  # type: ignore[type-var]

    def changes(self, site: NodeSite) -> Sequence[Any] | Irreversible:
        return Irreversible("the wrong number was used in computations, which can't be undone; the job has to notice")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that a rank's numbers changed, or that a rank gave up. A job that notices the corruption ends, or
        goes back, before the weights show it. If another rank gives up first, torchrun sends SIGTERM to the rank that
        was hit."""
        given_up = died(record, fault, *_REFUSALS, -signal.SIGTERM) if _some_rank_gave_up(record, fault) else None
        return seen_by_others(record, fault) or given_up or broke_off(record, fault)

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        return seen_by_twin(record, twins, fault)


def _some_rank_gave_up(record: Record, fault: str) -> bool:
    """Whether, after each landing and before a landing of another fault, a rank of the same attempt ended itself with
    an error."""
    exits = [event for event in record.of_kind(Kind.RANK_EXITED) if event.data["exit_code"] in _REFUSALS]
    others = [event.mono_s for event in record.of_kind(Kind.APPLYING, Kind.APPLIED) if event.data["fault"] != fault]
    return all(
        any(
            end.attempt == hit.attempt and end.mono_s > hit.mono_s
            and not any(hit.mono_s < other < end.mono_s for other in others)
            for end in exits
        )
        for hit in record.of_fault(fault, Kind.APPLYING)
    )  # fmt: skip


def corrupt(site: RankSite, what: str, tensors: Sequence[Any], injector: Any) -> None:
    """Changes one number of `tensors` in place, as the parameters of `injector` say, and reports the change as an
    effect. `what`: the word for one of the tensors in the report. An error is reported, too, and never reaches the
    job."""
    try:
        effect = _corrupt(what, tensors, injector)
    except Exception as error:
        site.emit(Kind.MISSED, {"fault": site.fault, "reason": f"no {what} was corrupted: {error}"})
    else:
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect})


def _corrupt(what: str, tensors: Sequence[Any], injector: Any) -> str:
    torch: Any = import_module("torch")
    own = [local(one).data for one in tensors]  # with detach(), autograd would notice the change
    own = [one for one in own if one.is_floating_point() and one.numel()]
    if not own:
        raise ValueError("there is none")
    at = min(int(injector.place * sum(one.numel() for one in own)), sum(one.numel() for one in own) - 1)
    number = 0
    while at >= own[number].numel():
        at -= own[number].numel()
        number += 1
    tensor = own[number]
    index = _index(at, tensor.shape)
    with torch.no_grad():
        before = float(tensor[index])
        if injector.change == "flip":
            bit = injector.bit % (8 * tensor.element_size())
            # The sign bit is the smallest integer.
            mask = 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
            as_integers(torch, tensor)[index] ^= mask
        else:
            tensor[index] = _VALUES[injector.change]
        after = float(tensor[index])
    return f"{what} {number}, element {at}: {before!r} became {after!r}"


def gradients(call: Call) -> list[Any]:
    """The tensors that this rank puts into `call`, if it is a reduction of gradients. Empty for any other
    collective."""
    return _arrays(call) if call.op in ("all_reduce", "reduce_scatter") else []


def gathered(call: Call) -> list[Any]:
    """The tensors that this rank gives to the others by `call`, if it is an all_gather. Empty for any other
    collective."""
    return _arrays(call) if call.op == "all_gather" else []


def _arrays(call: Call) -> list[Any]:
    """The tensors of more than 8 floats that this rank gives: no loss, no flag. In a call with separate tensors for the
    result, these come first (but not in functional collectives)."""
    second = call.op != "all_reduce" and hasattr(call.args[1], "__len__")
    found, stack = [], list(call.args[second : second + 1])
    while stack:
        one = stack.pop(0)
        if isinstance(one, (list, tuple)):
            stack = [*one, *stack]
        elif hasattr(one, "is_floating_point") and one.is_floating_point() and one.numel() > 8:
            found.append(one)
    return found


def _index(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        index.append(rest)
    return tuple(reversed(index))
