"""torchaos explain: the story of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from torchaos.harness.cli.options import RUN_DIRS, cli
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.telling.explain.shown import tell
from torchaos.harness.telling.explain.story import story_of


@cli.command()
@RUN_DIRS
def explain(folders: Sequence[Path]) -> None:
    """Tell the story of a run in plain words. It has the plan, the events with times, the evidence, and the reason
    of the verdict. Only the run directory is read. Exit code 0, whatever the verdict."""
    for folder in folders:
        tell(story_of(RunDir(folder.absolute()).check()), Console())
