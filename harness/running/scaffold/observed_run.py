"""One run of a job without faults: the data that the agent saw in it, and the step that is chosen for the first fault,
where a wrong recovery shows most.

The run is the twin that the scenario's first run needs anyway, so it stays in the cache."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torchaos.harness.analysis.comparison.sample_counts import FirstUses
from torchaos.harness.analysis.missing_data import why_unseen
from torchaos.harness.record.checkpoint_names import name_of_all
from torchaos.harness.record.history import Save
from torchaos.harness.record.history.saves_and_loads import by_step
from torchaos.harness.record.plan import Plan, counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.engine.stages import Run, Stoppable, Watcher
from torchaos.harness.running.twin import Twins


@dataclass(frozen=True)
class Seen:
    """One kind of data: what a run without faults showed of it, and the assertions that can't judge without it."""

    name: str
    words: str  # a description of the data, or why there is none
    blind: tuple[str, ...] = ()  # the assertions that can't judge without this data; empty if the data was seen


def seen_in(run: Record) -> Iterator[Seen]:
    """Yields one result for each kind of data."""
    steps = run.history.executions
    ranks = len(steps.ranks)
    if not steps:
        why = why_unseen(run, "steps")
        yield Seen(
            "steps", why, ("recovery_time", "loss_continuity", "sample_accounting", "state_restored", "no_lost_work")
        )
        return
    by = "by the agent" if run.history.source == "agent" else "in the job's log"
    yield Seen("steps", f"{run.history.last_step} on {counted(ranks, 'rank')}, {by}")
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
    """If the job saved its checkpoints to another folder than the scenario names: a sentence with that folder.
    Otherwise empty."""
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
    return Seen("checkpoints", f"{counted(len(groups), 'save')}{steps}, the last to {last}")


_BEST = re.compile("best", re.IGNORECASE)


@dataclass(frozen=True)
class Chosen:
    """The step for a fault. `says`: where the step is, in words. `misses`: what a death in this step can't show, as
    clauses."""

    step: int
    says: str
    misses: tuple[str, ...] = ()


def chosen_in(run: Record) -> Chosen | None:
    """The step for a fault in a job that made this run. None if it made too few steps."""
    saves = [(save.global_step, save.path) for save in run.history.saves if save.ok and save.global_step]
    epoch = min(FirstUses(run.history.by_step()).repeated(), default=None)
    return chosen(run.history.last_step, saves, epoch)


def chosen(last: int | None, saves: Sequence[tuple[int, str]], epoch: int | None) -> Chosen | None:
    """The step at which a death costs work, with enough steps after it. None if there is none. `last`: the last step.
    `saves`: step and path of each save. `epoch`: the step with which the second epoch begins.

    The step is never that of a save; it is between two checkpoints, if possible after the second one, and in a later
    epoch. It is also after the newest `best` checkpoint: before it, a job that has forgotten its best value would go
    unnoticed, because it writes a `best` checkpoint again anyway."""
    if last is None or last < 3:
        return None
    best = max((step for step, path in saves if _is_best(path) and step < last), default=0)
    name = next((posixpath.basename(path) for step, path in saves if step == best and _is_best(path)), "")
    early = [(step, path) for step, path in saves if step < last]
    at = sorted({step for step, path in early if not _is_best(path)} or {step for step, _ in early})
    if not at:
        return Chosen(last // 2 + 1, "", ("the job saved nothing before its end, so a death costs everything",))
    wanted = [limit for limit in (epoch, best) if limit]
    places = at[1:] or at
    free = _free(last, saves)
    ends = dict(pairwise([*at, last]))
    begin = max(
        places,
        key=lambda step: (sum(step >= limit for limit in wanted), bool(free & {*range(step + 1, ends[step])}), -step),
    )
    end = ends[begin]
    middle = min(begin + max(1, (end - begin) // 2), last - 1)
    between = free & {*range(begin + 1, end)}
    step = min(between, key=lambda step: (abs(step - middle), step), default=middle)
    misses = []
    if epoch and begin < epoch:
        misses.append("no checkpoint follows the second epoch's begin: a wrong order of samples in it does not show")
    elif not epoch:
        misses.append("one epoch was seen: the order of samples in a later epoch does not show")
    if begin < best:
        misses.append(
            f"{name} was last written after step {best}, which comes later: a forgotten best value does not show"
        )
    return Chosen(step, f"in step {step}, after the save of step {begin}", tuple(misses))


def _is_best(path: str) -> bool:
    return bool(_BEST.search(posixpath.basename(path)))


def _free(last: int, saves: Iterable[tuple[int, str]]) -> set[int]:
    """The steps at which nothing is saved. Files whose paths differ only in numbers are one series; each series is
    taken to be saved with a constant period."""
    families: dict[str, list[int]] = {}
    for step, path in sorted(saves):
        families.setdefault(re.sub(r"\d+", "", path), []).append(step)
    periods = {math.gcd(*(b - a for a, b in pairwise(steps))) for steps in families.values() if len(steps) > 1}
    return {step for step in range(1, last) if not any(step % each == 0 for each in periods if each > 1)}


class HealthyRun(Stoppable):
    """One run without faults. `stop` may be called from a signal handler; the run is then ended in the normal way, and
    its changes are undone."""

    def __init__(self, plan: Plan, watcher: Watcher | None = None) -> None:
        super().__init__()
        self._watcher = watcher
        self._twins = Twins(plan, self._execute, given_up=lambda: bool(self._stopped))
        self.problem = ""  # why there is no usable record, as a clause

    @property
    def is_made(self) -> bool:
        """Whether the run without faults is in the cache already."""
        return self._twins.has(0)

    def __call__(self, scratch: Path) -> Record | None:
        """Makes the run, or takes it from the cache. Returns its record, or None if the run left no record. If the job
        did not end successfully, the attribute `problem` says why. `scratch`: an empty folder. Raises ChaosError if the
        job can't be run."""
        folder = RunDir(scratch)
        (folder.root / "twins").mkdir(parents=True, exist_ok=True)
        if self._twins.give(0, folder):
            return Record.load(RunDir(folder.twins / "0"))
        failed = self._twins.failed
        ended = str(failed.stopped.data["reason"]) if failed and failed.stopped else ""
        code = f"the job failed without a fault (exit code {failed.exit_code})" if failed else "the job was not run"
        self.problem = self._stopped or self._twins.died or (f"the job was ended: {ended}" if ended else code)
        return failed

    def _execute(self, plan: Plan, folder: RunDir) -> None:
        plan.write(folder.plan)
        self._carry_out(Run(plan, folder, (), self._watcher))
