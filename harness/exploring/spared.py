"""States that need no resume, because the job does the same from them as from a state that was resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchaos.harness.exploring.alike import Alike
from torchaos.harness.exploring.looks import Lookout, Looks
from torchaos.harness.exploring.outcomes import Outcome
from torchaos.harness.exploring.standing import Standing
from torchaos.harness.exploring.states.state import State
from torchaos.harness.exploring.trials import Trials
from torchaos.harness.exploring.warm.resumes import Shown, difference
from torchaos.harness.record.record import Record

LIKE = (
    "all that the job asks of the checkpoint folder is the same as in a state from which it was resumed; each was "
    "judged with its own death"
)
_FIRST = 3  # resumes whose questions are noted before a state must have been spared

Resume = Callable[[State], tuple[Outcome, Record] | None]


class Spared:
    """What is known of the resumes so far, and the states for which they stand."""

    def __init__(self, trials: Trials, home: Path, states: Sequence[State]) -> None:
        self._trials = trials
        self.every = Lookout(home / "looking")  # for a resume whose questions are always noted
        self._alike = Alike(home, states)
        self._standing: Standing | None = Standing(trials, home / "standing")
        self._looked = self._stood = 0  # resumes that may stand for others; states for which one did
        self.doubt = ""  # why resumes that trained stand for no others, as a sentence

    @property
    def lookout(self) -> Lookout | None:
        """What notes the questions of the next resume. None: they are not noted, because noting takes time, and saved
        no resumes so far."""
        return self.every if self._standing and self._looked <= _FIRST + self._stood else None

    def learn(self, state: State, looks: Looks, found: Outcome, run: Record) -> None:
        """Keeps a resume that trained. Its files must still be in the folder of resumes."""
        self._looked += 1
        if self._standing:
            self._standing.learn(state, looks, found, run.exit_code == 0 and not run.stopped)

    def learn_failure(self, state: State, looks: Looks) -> None:
        """Keeps what the job asked before it failed from this state, which must have failed twice."""
        self._alike.learn(state, looks)

    def of(self, state: State, done: Mapping[tuple[str, str], Outcome], resume: Resume | None) -> Outcome | None:
        """The outcome of the state by a resume from another state; None if there is none. The first such outcome is
        checked by `resume`; if it differs, no resume that trained stands for others from then on."""
        found = self._alike.of(state, self._trials.died_at, done)
        if found or self._standing is None:
            return found
        stood = self._standing.of(state)
        if stood and resume and not self._stood:
            shown = Shown.of(stood[1])
            real = resume(state)
            if real is None:
                return None
            self.doubt = _doubt(stood[0], shown, real[0], Shown.of(real[1]))
            if self.doubt:
                self._standing.close()
                self._standing = None
                return real[0]
        self._stood += stood is not None
        return stood[0] if stood else None

    def close(self) -> None:
        self.every.close()
        if self._standing:
            self._standing.close()


def _doubt(found: Outcome, shown: Shown, real: Outcome, really: Shown) -> str:
    same = real.kind is found.kind
    why = difference(shown, really) or ("" if same else f"it gives '{real.kind.value}', not '{found.kind.value}'")
    return why and (
        f"no resume stands for other states: {found.state} looks the same to the job as {found.like}, and was resumed "
        f"to check that: {why}"
    )
