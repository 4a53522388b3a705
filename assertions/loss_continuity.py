"""Did the loss continue as if nothing had happened?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchaos.harness.analysis.comparison.agreement import differences, history_of
from torchaos.harness.analysis.comparison.causes import likeliest_cause
from torchaos.harness.analysis.comparison.losses import Comparison, first_of, in_words, measured_of
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.replica_verdict import absent_in_words, why_no_steps
from torchaos.harness.record.record import records_of
from torchaos.harness.record.steps.executions import equal
from torchaos.plugin import Assertion, Finding, Harm, History, Need, Record, failed, inconclusive, passed
from torchaos.plugin.analysis import each

_BLIND = "without a twin, steps that were done only once were compared with nothing"


@dataclass(frozen=True)
class LossContinuity(Assertion):
    """Compares losses and learning rates of the final history with the twins', by step and rank. `tolerance` is
    relative (0.001: a thousandth) to the value, or to the run's typical loss if the value is smaller. Without it,
    losses must be bitwise equal, except for rounding after a restart on three ranks or more. If several twins differ
    from each other, the tolerance of each step is learned from them. After a change of world size, the means over the
    ranks are compared."""

    name = "loss_continuity"
    harm = Harm.WRONG_RESULT
    needs = frozenset(
        {Need.STEPS, Need.LOSS, Need.SAMPLES, Need.TWIN}  # samples: other samples give other losses
    )

    tolerance: float | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        history = history_of(run, twins)
        if not history.executions:
            return inconclusive(f"no step was seen: {why_unseen(run, 'steps')}")
        if not history.executions.loss_seen.any():
            return inconclusive(f"no loss was seen: {why_unseen(run, 'loss')}")
        if history.unplaced:
            return inconclusive(why_unplaced(run, history.unplaced))
        if not twins:
            return replace(self._redone(run, history), bound={"tolerance": self.tolerance or 0.0})
        blind = next((twin for twin in twins if not twin.history.executions.loss_seen.any()), None)
        if blind:
            return inconclusive(f"the twin's losses were not seen: {why_unseen(blind, 'loss')}")
        comparison = Comparison(run, history, twins, self.tolerance)
        return replace(comparison.finding(), bound=comparison.bound)

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Judges the run like a run without replicas. Inconclusive if a replica was absent from a step."""
        parts = records_of(run)
        if blind := why_no_steps(parts):
            return blind
        if gone := absent_in_words(parts):
            return inconclusive(
                f"{gone}, on fewer samples than in the twin: from then on neither weights nor losses are the twin's, "
                "so a difference proves nothing"
            )
        return each(self, run, twins)

    def _redone(self, run: Record, history: History) -> Finding:
        """Compares each step that was done again with its first execution."""
        olds, news = history.repeated()
        seen = olds.loss_seen & news.loss_seen
        if not seen.any():
            return inconclusive("there is no twin, and no step was done twice: nothing to compare the losses with")
        near = ~(equal(olds, news, "losses") & equal(olds, news, "lr")) & seen
        for old, new in zip(olds.at(near), news.at(near), strict=True):
            ours, theirs = {new.global_step or 0: {new.rank: new}}, {old.global_step or 0: {old.rank: old}}
            first = next(differences(ours, theirs, self.tolerance or 0.0), None)
            if first:
                of_rank = news.rank == new.rank
                every = {one.global_step or 0: {one.rank: one} for one in olds.at(of_rank)}
                again = {one.global_step or 0: {one.rank: one} for one in news.at(of_rank)}
                cause = likeliest_cause(run, history, {**again, **ours}, {**every, **theirs}, first)
                words = f"{in_words(first, 'the first time')} {cause.words}"
                finding = failed(words, first_of(first), **measured_of(first))
                return replace(finding, cause=cause.short, at_s=new.mono_s)
        steps = np.unique(news.global_step[seen]).tolist()
        return passed(
            f"all {len(steps)} steps that were done again ({steps[0]} to {steps[-1]}) gave the same losses as the "
            f"first time; {_BLIND}",
            steps=len(steps),
        )
