"""The parameters that a scenario gives to a plug-in: whatever is wrong with them has its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from torchaos.harness.base_classes import Share
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.scenario.checks import check_parameters

AT = ("faults", 0, "with")


@dataclass(frozen=True)
class Theirs:
    """Raises what `how` names, as the plug-in of another package may."""

    name: ClassVar[str] = "mine.fault"
    how: str = ""
    share: Share = 0.5

    def __post_init__(self) -> None:
        if self.how:
            raise {"value": ValueError, "usage": UsageError, "chaos": ChaosError, "type": TypeError}[self.how](
                "no good"
            )


def told(**given: Any) -> list[Any]:
    """The place and the text of each mistake."""
    found: list[Any] = []
    check_parameters(Theirs, given, AT, lambda *mistake: found.append(mistake[:2]))
    return found


@pytest.mark.parametrize(("how", "text"), [
    ("value", "mine.fault: no good"), ("usage", "mine.fault: no good"), ("chaos", "mine.fault: no good"),
    ("type", "mine.fault: its own check failed: TypeError: no good"),
])  # fmt: skip
def test_what_a_plug_in_itself_refuses_has_its_place(how: str, text: str) -> None:
    """Whatever kind of error its `__post_init__` raises: it is one mistake at the parameters, and no traceback."""
    assert told(how=how) == [(AT, text)]
    assert told() == []


@pytest.mark.parametrize(("share", "text"), [
    (1.5, "share is less than 1, not 1.5"), (-1, "share is at least 0, not -1"),
    ("half", "share is a number, not 'half'"),
])  # fmt: skip
def test_a_share_is_from_0_to_1(share: object, text: str) -> None:
    """The bound is written as people write it."""
    assert told(share=share) == [((*AT, "share"), text)]
