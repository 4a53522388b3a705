"""torchaos explain: the story of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from torchaos.harness.cli.options import AS_JSON, RUN_DIRS, VERBOSE, cli
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.telling.explain.shown import tell
from torchaos.harness.telling.explain.story import story_of


@cli.command()
@RUN_DIRS
@AS_JSON
@VERBOSE
def explain(folders: Sequence[Path], as_json: bool, verbose: bool) -> None:
    """Tell the story of a run in plain words. It has the plan, the events with times, the evidence, and the reason
    of the verdict. Only the run directory is read. Exit code 0, whatever the verdict."""
    for folder in folders:
        story = story_of(RunDir(folder.absolute()).check(), whole=verbose or as_json)
        if as_json:
            click.echo(json.dumps(asdict(story)))
        else:
            tell(story, Console())
