"""Resolves the assertions and conditions of a plan: a name and checked parameters."""

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
    """The assertion or condition `item` with all its parameters, defaults included. `group`: "assertions" or
    "conditions"."""
    found: Any = registry.find(group, item.name)
    return Named(item.name, check_parameters(found, item.params, (), ignore))


def ignore(*_: object) -> None:
    """Accepts and drops mistakes in parameters, which the loader has already reported."""


def condition(item: Item, file: Path) -> Named:
    """A condition of the plan. Placeholders in its commands are filled. `file`: the scenario file."""
    found, values = named("conditions", item), placeholders(file.parent.absolute())
    filled = {
        name: [fill(word, values) for word in value] if isinstance(value, list) else value
        for name, value in found.params.items()
    }
    return Named(found.name, filled)


def with_facts_of(condition: Named, faults: Sequence[PlannedFault]) -> Named:
    """The condition with the parameters that depend on the planned faults (see `of_faults` of a condition)."""
    facts = registry.find("conditions", condition.name).of_faults(condition.params, faults)
    return replace(condition, params={**condition.params, **facts})
