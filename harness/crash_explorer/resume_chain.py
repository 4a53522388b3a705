"""The chain of those who can resume the job from a state, the cheapest first:

reuse            a resume from another state, if the job sees no difference
warm_resumes     forked ranks. A failure of theirs is only suspected, until a start without a fork shows it:
warm_resumes     new interpreters, if the launcher has shown the same failure before, and as long as they show it
launcher_resume  the job's own launcher"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.launcher_resume import LauncherResume
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, failed_at_once, failure, is_suspected, with_proof
from torchaos.harness.crash_explorer.resume_runs import Resume, ResumeRuns
from torchaos.harness.crash_explorer.reuse import ReusedResumes
from torchaos.harness.crash_explorer.warm_resumes import WarmResumes


class ResumeChain:
    """Resumes the job from one state after the other. `stop` and `hurry` may be called from a signal handler."""

    def __init__(
        self, trials: ResumeRuns, launcher: LauncherResume, forks: WarmResumes | None, home: Path,
        states: Sequence[State], done: Mapping[tuple[str, str], Outcome],
    ) -> None:  # fmt: skip
        """`done`: the outcomes so far, which the caller adds to. `forks`: None: ranks are not forked."""
        self._trials, self._launcher, self._forks, self._done = trials, launcher, forks, done
        self._reused = ReusedResumes(trials, home, states)
        self._stopped = False
        self.notes: list[str] = []  # failures that only forked ranks had, one sentence each

    @property
    def doubt(self) -> str:
        """Why no resume stands for other states, as a sentence; empty if there is no doubt."""
        return self._reused.doubt

    @property
    def in_words(self) -> str:
        """How most states were resumed."""
        return self._forks.in_words if self._forks else "by the job's own launcher"

    @property
    def left(self) -> list[str]:
        return [*self._launcher.left, *self._trials.left]

    def stop(self, reason: str) -> None:
        self._stopped = True
        self._launcher.stop(reason)
        if self._forks:
            self._forks.stop()

    def hurry(self, reason: str) -> None:
        self.stop(reason)
        self._launcher.hurry(reason)

    def close(self) -> None:
        if self._forks:
            self._forks.close()
        self._reused.close()
        self._trials.close()

    def quick(self, state: State) -> Outcome | None:
        """The outcome without a start of the job. None if ranks can't be forked."""
        found = self._of_another(state)
        made = self._forks(state, self._reused.tracers) if self._forks and not found else None
        if made and not self._stopped:
            self._reused.learn(state, made)
        found = made.outcome if made else found
        return found and with_proof(found, self._done.values())

    def confirmed(self, state: State, suspected: Outcome) -> Outcome | None:
        """The outcome of a state from which forked ranks have failed, by what the other starts have shown meanwhile, or
        by a start of the job."""
        found = with_proof(suspected, self._done.values())
        if is_suspected(found):
            found = self._of_another(state) or suspected
        return self.started(state, suspected) if is_suspected(found) else found

    def started(self, state: State, suspected: Outcome | None = None) -> Outcome | None:
        """The outcome of a start of the job. `suspected`: the failure of forked ranks; this is returned if the chain is
        stopped before there is another outcome."""
        again = suspected is None or suspected.mended is not False
        made = self._by_interpreters(state, again, suspected) if suspected else None
        if not made and not self._stopped:
            made = self._launcher(state, again, self._reused.every)
        if not made or self._stopped:
            return suspected
        found = made.outcome
        self._learn(state, made, suspected)
        if suspected is None:
            return found
        if suspected.kind is found.kind:
            mended = suspected.mended if found.mended is None else found.mended
            same = failure(suspected) == failure(found)
            return replace(found, mended=mended, printed=suspected.printed if same else "")
        self.notes.append(
            f"{state.name}: forked ranks gave '{suspected.kind.value}' ({suspected.reason}), and a cold start "
            f"'{found.kind.value}', which counts"
        )
        return found

    def _learn(self, state: State, made: Resume, suspected: Outcome | None) -> None:
        """Keeps a start of the job that may stand for those from other states."""
        same = suspected is None or failure(suspected) == failure(made.outcome)
        if not made.reads:
            return
        if not failed_at_once(made.record):
            if same:
                self._reused.learn(state, made)
        elif made.outcome.mended is False if suspected is None else same:
            self._reused.learn_failure(state, made.reads)  # a failure that came once may be chance

    def _of_another(self, state: State) -> Outcome | None:
        return self._reused.of(state, self._done, self._forks)

    def _by_interpreters(self, state: State, again: bool, suspected: Outcome) -> Resume | None:
        """A resume by new interpreters. None if they must not decide."""
        known = any(not one.warm and failure(one) == failure(suspected) for one in self._done.values())
        made = self._forks.anew(state, again, self._reused.every) if known and self._forks else None
        return made if made and failure(made.outcome) == failure(suspected) else None
