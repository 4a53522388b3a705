"""Prints the result of an exploration on a terminal."""

from __future__ import annotations

from rich.console import Console

from torchaos.harness.crash_explorer.exploration_summary import NAME as SCRIPT
from torchaos.harness.crash_explorer.exploration_summary import Explored, told
from torchaos.harness.crash_explorer.resume_outcomes import Class, Outcome, is_suspected
from torchaos.harness.record.plan import seconds_in_words
from torchaos.harness.record.result import Result
from torchaos.harness.reporting.terminal.text import Pen

_NAME = 17  # columns


def tell_outcome(outcome: Outcome, number: int, of: int) -> str:
    """Prints a line about a state that was just tried."""
    right = outcome.kind is Class.RIGHT
    how = ", cold" if not outcome.warm else "" if right else "; not confirmed by a cold start"
    how = f"; the same failure by a cold start: {outcome.shown_by}" if outcome.shown_by else how
    why = "" if right else f": {outcome.reason}"
    if outcome.like:
        return f"{number}/{of} {outcome.state}: {outcome.kind.value}, as {outcome.like}, which is the same for the job"
    return f"{number}/{of} {outcome.state}: {outcome.kind.value}{why} ({outcome.seconds:.1f} s{how})"


def show(found: Explored, result: Result, console: Console) -> None:
    """Prints the verdict, the classes, and the story of the smallest state that fails."""
    pen = Pen(console)
    pen.gap()
    pen.row([(pen.mark(result.verdict), 1)], pen.text(f"{result.verdict.value}: {result.reason}", "bold"))
    pen.gap()
    pen.heading("Outcomes", f"{len(found.outcomes)} of {found.choice.in_all} states; started {found.warm}")
    for kind in Class:
        own = found.of(kind)
        words = told(own) if own and kind is not Class.RIGHT else ""
        pen.row([(pen.text(kind.value), _NAME), (pen.text(f"{len(own):>5}"), 7)], pen.text(words), indent=3)
    share = found.fatal_share
    if share is not None:
        of = f"{seconds_in_words(found.fatal_s)} of {seconds_in_words(found.tried_s)}"
        if found.unconfirmed_fatal_s:
            of += f"; {seconds_in_words(found.unconfirmed_fatal_s)} of this not confirmed by a cold start"
        pen.row([(pen.text("a death is fatal"), _NAME)], pen.text(f"in {share:.1%} of the run's time ({of})"), indent=3)
    if smallest := found.smallest:
        _story(smallest, pen)
    for note in [*found.notes, *found.recording.unsure]:
        pen.row([(pen.text("note:", "yellow"), 6)], pen.text(note), indent=1)
    pen.gap()
    pen.long_line(pen.text("Files:"), 7, result.run_dir)


def _story(one: Outcome, pen: Pen) -> None:
    pen.gap()
    pen.heading(
        "The smallest", f"{one.state}: {one.model} at step {one.died_at_step}, after {one.operations} operations"
    )
    pen.row([(pen.text("last operation"), _NAME)], pen.text(one.last_operation or "none"), indent=3)
    for path, what in one.files:
        pen.row([(pen.text(path), 40)], pen.text(what), indent=3)
    doubt = " (not confirmed by a cold start)" if is_suspected(one) else ""
    pen.row([(pen.text("then"), _NAME)], pen.text(f"{one.kind.value}{doubt}: {one.reason}"), indent=3)
    if one.mended is not None:
        again = "gets past the death" if one.mended else "fails as well"
        pen.row([(pen.text("a second start"), _NAME)], pen.text(again), indent=3)
    if one.run_dir:
        pen.long_line(pen.text("shown by"), _NAME, f"sh {one.run_dir}/{SCRIPT}")
