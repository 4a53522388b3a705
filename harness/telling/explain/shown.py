"""Prints the story of a run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from torchaos.harness.telling.explain.story import Story
from torchaos.harness.telling.terminal.pen import Pen


def tell(story: Story, console: Console) -> None:
    """Prints the story of a run. Each event is shown with its time in seconds since the run began."""
    pen = Pen(console)
    pen.gap()
    pen.row([], pen.text(story.title, "bold"), indent=1)
    if story.about:
        pen.row([], pen.text(story.about, "dim"), indent=1)
    _chapter(pen, "What was planned", story.planned)
    pen.heading("What happened", "seconds since the run began")
    for moment in story.happened:
        pen.row([(Text(f"{moment.at_s:9.2f}", "dim"), 9)], pen.text(moment.text), indent=1)
    _chapter(pen, "The outcome", story.seen)
    _chapter(pen, "Why", story.why)
    _chapter(pen, "What may be missing here", story.doubts)
    pen.gap()


def _chapter(pen: Pen, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        pen.heading(title)
    for sentence in sentences:
        pen.row([(pen.text(pen.marks.dot, "dim"), 1)], pen.text(sentence), indent=3)
