"""passed, failed and inconclusive: what a plug-in says with them is what the finding has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchaos.plugin import Finding, failed, inconclusive, passed


@pytest.mark.parametrize("answer", [passed, failed, inconclusive])
@pytest.mark.parametrize("name", ["first", "at_s", "bound", "cause", "outcome", "measured"])
def test_a_field_of_a_finding_is_no_measured_value(answer: Callable[..., Finding], name: str) -> None:
    """It is refused, with the way to set it, instead of being stored where nobody looks for it."""
    with pytest.raises(TypeError, match=rf"{name} is a field .* write replace\({answer.__name__}\(\.\.\.\), {name}="):
        answer("why", **{name: {}})


@pytest.mark.parametrize("answer", [passed, failed, inconclusive])
def test_a_second_reason_is_refused(answer: Callable[..., Any]) -> None:
    """A reason is given once."""
    with pytest.raises(TypeError, match="reason"):
        answer("why", reason="because")
