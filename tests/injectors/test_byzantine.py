"""numeric.scaled_gradient and numeric.stale_gradient report what they did when they have done it, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torchaos.harness.protocol.wire import Kind
from torchaos.injectors.numeric_byzantine import ScaledGradient, StaleGradient


class Site:
    """Keeps what the injector asked for and said."""

    fault = "byzantine"

    def __init__(self) -> None:
        self.told: list[str] = []

    def at_collectives(self, then: Any) -> None:
        self.call = then

    def after_steps(self, then: Any) -> None:
        self.step_over = then

    def emit(self, kind: Kind, data: dict[str, Any]) -> None:
        assert kind is Kind.EFFECT
        self.told.append(data["effect"])


def reduced(op: str, *numbers: float) -> Any:
    return SimpleNamespace(op=op, args=([torch.tensor(numbers)],))


def gather(*args: Any) -> Any:
    return SimpleNamespace(op="all_gather", args=args)


def test_a_scaled_gradient_is_told_of_when_the_first_is_scaled() -> None:
    """An all_gather and a flag of one number reach no gradient; of all that are scaled, the first is told of."""
    site: Any = Site()
    ScaledGradient(factor=-2.0).apply(site)
    site.call(reduced("all_gather", *[1.0] * 9))
    site.call(reduced("all_reduce", 1.0))
    assert site.told == []
    for _ in range(2):
        site.call(call := reduced("all_reduce", *[1.0] * 9))
    assert call.args[0][0].tolist() == [-2.0] * 9
    assert site.told == ["gradients are -2.0 times what they should be"]


def test_what_a_rank_gives_to_an_all_gather_is_scaled() -> None:
    """Its own part, and neither the place of the result nor a sum; in a functional collective, the first argument."""
    site: Any = Site()
    ScaledGradient(factor=-2.0, operation="all_gather").apply(site)
    site.call(summed := reduced("all_reduce", *[1.0] * 9))
    site.call(flag := gather([[torch.ones(1)]], [torch.ones(1)]))
    assert site.told == []
    result, own, functional = [torch.ones(9)], torch.ones(9), torch.ones(9)
    site.call(gather([result], [own]))
    site.call(gather(functional, 3, "group"))
    assert own.tolist() == functional.tolist() == [-2.0] * 9
    assert result[0].tolist() == summed.args[0][0].tolist() == [1.0] * 9
    assert flag.args[1][0].tolist() == [1.0]
    assert site.told == ["gradients are -2.0 times what they should be"]


def test_a_stale_gradient_is_told_of_when_the_first_takes_anothers_place() -> None:
    """In the step that is kept nothing is wrong yet."""
    site: Any = Site()
    StaleGradient().apply(site)
    site.call(reduced("all_reduce", *[1.0] * 9))
    site.step_over()
    assert site.told == []
    site.call(call := reduced("all_reduce", *[5.0] * 9))
    assert call.args[0][0].tolist() == [1.0] * 9
    assert site.told == ["gradients are those of an earlier step"]
