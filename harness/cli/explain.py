"""torchaos explain: the story of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from torchaos.harness.cli.options import AS_JSON, RUN_DIRS, VERBOSE, cli
from torchaos.harness.cli.run_output import is_told
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.explain.story import story_of, tell


@cli.command()
@RUN_DIRS
@AS_JSON
@VERBOSE
def explain(folders: Sequence[Path], json_file: Path | None, verbose: bool) -> None:
    """Tell the story of a run in plain words. It has the plan, the events with times, the evidence, and the reason
    of the verdict. Only the run directory is read. Exit code 0, whatever the verdict. The JSON of several runs is a
    list."""
    runs = [RunDir(folder.absolute()).check() for folder in folders]
    if json_file:
        told = [asdict(story_of(run, whole=True)) for run in runs]
        if is_told(json_file, told if len(told) > 1 else told[0]):
            return
    for run in runs:
        tell(story_of(run, whole=verbose), Console())
