"""Assertions and conditions of a plan, by name, with their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchaos.harness import registry
from torchaos.harness.record.plan import Named, PlannedFault
from torchaos.harness.running.planner.job import placeholders
from torchaos.harness.scenario.grammar import Item
from torchaos.harness.scenario.parameters import check_parameters
from torchaos.harness.scenario.placeholders import fill


def named(group: str, item: Item) -> Named:
    found: Any = registry.find(group, item.name)
    return Named(item.name, check_parameters(found, item.params, (), silent))


def silent(*_: object) -> None:
    """The loader has told of all that is wrong with parameters."""


def condition(item: Item, file: Path) -> Named:
    """A command in it may name placeholders."""
    found, values = named("conditions", item), placeholders(file.parent.absolute())
    filled = {
        name: [fill(word, values) for word in value] if isinstance(value, list) else value
        for name, value in found.params.items()
    }
    return Named(found.name, filled)


def of_faults(condition: Named, faults: Sequence[PlannedFault]) -> Named:
    """With what the condition wants to know of the faults that were planned."""
    told = registry.find("conditions", condition.name).of_faults(condition.params, faults)
    return replace(condition, params={**condition.params, **told})
