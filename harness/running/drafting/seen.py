"""The data that the agent saw in a run without faults, and the assertions that lack data."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from torchaos.harness.judging.gaps.unseen import why_unseen
from torchaos.harness.record.history import Save
from torchaos.harness.record.history.saved_steps import by_step, name_of_all
from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Seen:
    name: str
    words: str  # a description of the data that was seen, or why there is none
    blind: tuple[str, ...] = ()  # the assertions that can't judge without this data; empty if the data was seen


def seen_in(run: Record) -> Iterator[Seen]:
    """Yields one line for each kind of data."""
    steps = run.history.executions
    ranks = len(steps.ranks)
    if not steps:
        why = why_unseen(run, "steps")
        yield Seen(
            "steps", why, ("recovery_time", "loss_continuity", "sample_accounting", "state_restored", "no_lost_work")
        )
        return
    by = "by the agent" if run.history.source == "agent" else "in the job's log"
    yield Seen("steps", f"{run.history.last_step} on {_counted(ranks, 'rank')}, {by}")
    count = int(steps.loss_seen.sum())
    yield _share("losses", count, len(steps), why_unseen(run, "loss"), "loss_continuity")
    drawn = "by index" if (steps.column("in_indices") > 0).any() else "by contents"
    count = int(steps.samples_known.sum())
    yield _share("samples", count, len(steps), why_unseen(run, "samples"), "sample_accounting", more=drawn)
    count = sum(execution.parameters is not None for execution in steps.with_state)
    yield _share("parameters", count, len(steps), why_unseen(run, "parameters"), "state_restored", "parameter_digest")
    if not any(execution.lr for execution in steps):
        yield Seen("learning rates", "no optimizer of torch made a step", ("lr_continuity",))
    yield _saves([save for save in run.history.saves if save.ok])
    if elsewhere := saved_elsewhere(run):
        yield Seen("checkpoint files", elsewhere, ("checkpoint_integrity",))


def saved_elsewhere(run: Record) -> str:
    """The folder in which the job saved its checkpoints, as a sentence, if it is not the folder that the scenario
    names. Otherwise empty."""
    named = run.plan.job.checkpoints
    saved = [save.path for save in run.history.saves if save.path.startswith("/")]
    if not named or not saved or not named.startswith("{run}"):
        return ""
    folder = named.replace("{run}", "/job", 1)  # RunDir.job
    if any(f"{folder}/" in f"{path}/" for path in saved):
        return ""
    return f"they were saved to {posixpath.dirname(saved[-1])}, not below {named}: the next run would resume from them"


def _share(name: str, count: int, steps: int, why: str, *blind: str, more: str = "") -> Seen:
    if not count:
        return Seen(name, why, blind)
    return Seen(name, f"in {'every step' if count == steps else f'{count} of {steps} steps'}{more and ', ' + more}")


def _saves(saves: list[Save]) -> Seen:
    if not saves:
        return Seen(
            "checkpoints", "no save was seen: a job that saves nothing begins anew after a death", ("no_lost_work",)
        )
    at = sorted({save.global_step for save in saves if save.global_step is not None})
    steps = f", after steps {', '.join(map(str, at[:5]))}{' …' if len(at) > 5 else ''}" if at else ""
    groups = by_step(saves)
    last = name_of_all([save.path for save in groups[-1]])
    return Seen("checkpoints", f"{_counted(len(groups), 'save')}{steps}, the last to {last}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
