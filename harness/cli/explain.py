"""torchaos explain: the story of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from torchaos.harness.cli.options import PATH, cli
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.telling.explain.shown import tell
from torchaos.harness.telling.explain.story import story_of


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=PATH, metavar="RUN_DIR...")
def explain(folders: Sequence[Path]) -> None:
    """Tell the story of a run in plain words.

    What was planned, what happened and when, what was seen, and why the verdict; from the run directory alone. Exit
    code 0, whatever the verdict.
    """
    for folder in folders:
        tell(story_of(RunDir(folder.absolute()).check()), Console())
