"""How often a scenario is repeated, and how many of the repetitions must pass."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.contracts import UsageError
from torchaos.harness.release.repeats.bounds import lower, needed
from torchaos.harness.scenario.grammar import Repeat

CONFIDENCE = 0.95
MISSING = "install SciPy (pip install 'torchaos[statistics]')"


@dataclass(frozen=True)
class Ask:
    """How often a scenario is repeated, and how many repetitions must pass. With neither `at_least` nor `rate`, each
    repetition is judged alone, and the worst verdict counts."""

    times: int = 1
    at_least: int | None = None  # the number that must pass
    rate: float | None = None  # the share that must pass, which must be shown with `confidence`
    confidence: float = CONFIDENCE

    @property
    def of_rate(self) -> bool:
        """Whether the repetitions are judged together, so that a single failed repetition does not fail the
        scenario."""
        return self.at_least is not None or self.rate is not None

    @property
    def in_words(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least} of {self.times} must pass"
        if self.rate is not None:
            return f"with {self.confidence:g} confidence, a share of at least {self.rate:g} must pass"
        return "all must pass"


def ask_of(
    written: Repeat | None, times: int | None = None, at_least: int | None = None, rate: float | None = None,
    confidence: float | None = None,
) -> Ask:  # fmt: skip
    """Combines `repeat` of the scenario with the options of the command line, which win. `times` replaces everything in
    the scenario; a criterion replaces the scenario's criterion. Raises UsageError if the criterion can't be met or
    contradicts itself."""
    base = Ask() if written is None else Ask(written.times, written.at_least, written.rate, written.confidence)
    base = base if times is None else Ask(times)
    if at_least is not None or rate is not None:
        base = Ask(base.times, at_least, rate, base.confidence)
    return _checked(base if confidence is None else Ask(base.times, base.at_least, base.rate, confidence))


def _checked(ask: Ask) -> Ask:
    if ask.at_least is not None and ask.rate is not None:
        raise UsageError("write either at_least or rate")
    if ask.of_rate and ask.times < 2:
        raise UsageError("a rate is judged over several repetitions; give their number, such as --repeat 30")
    if ask.at_least is not None and ask.at_least > ask.times:
        raise UsageError(
            f"at least {ask.at_least} of {ask.times} can never pass; ask for fewer, or repeat it more often"
        )
    if ask.rate is not None:
        best = lower(ask.times, ask.times, ask.confidence)
        if best is None:
            raise UsageError(f"a rate is shown by a confidence bound: {MISSING}, or ask for a number with `at_least`")
        if best < ask.rate:
            raise UsageError(
                f"{ask.times} repetitions can't show a rate of {ask.rate:g} with {ask.confidence:g} confidence, even "
                f"if all pass ({best:.3f}); {needed(ask.rate, ask.confidence)} are needed"
            )
    return ask
