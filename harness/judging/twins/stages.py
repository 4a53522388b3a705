"""Ranks without losses or samples, such as the stages of a pipeline that pass on what other ranks have computed."""

from __future__ import annotations

from torchaos.harness.record.history import StepTable
from torchaos.harness.record.steps.columns import is_none, lengths


def without_losses(*tables: StepTable) -> set[int]:
    """The ranks that have no loss in any step of these runs: all stages of a pipeline before the last stage."""
    ranks, seen = set[int](), set[int]()
    for table in tables:
        losses = table.executions.column("losses")
        ranks |= table.executions.ranks
        seen |= table.executions.at(lengths(losses) > is_none(losses).sum(1)).ranks
    return ranks - seen


def without_data(*tables: StepTable) -> set[int]:
    """The ranks that have neither a loss nor a sample in any step of these runs: the middle stages of a pipeline."""
    seen = set[int]().union(*(table.executions.at(table.executions.column("in_samples") > 0).ranks for table in tables))
    return without_losses(*tables) - seen
