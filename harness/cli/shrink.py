"""`torchaos shrink`: the smallest scenario that still fails."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

from torchaos.harness.cli.interrupt import signals
from torchaos.harness.cli.options import PATH, QUIET, RUN_DIR, cli
from torchaos.harness.contracts import UsageError
from torchaos.harness.judging.verdict.verdict import judge
from torchaos.harness.machine.disk import write_atomically
from torchaos.harness.narrowing.shrink import Shrink
from torchaos.harness.record.result import ExitCode
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.scenario.yaml_source import dumped


@cli.command()
@RUN_DIR
@click.option(
    "--tries", type=click.IntRange(1), default=3, show_default=True, help="How many tries each set of faults gets."
)
@click.option(
    "--fails", type=click.IntRange(1), default=2, show_default=True, help="How many of these tries must fail."
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    default=Path("shrunk.yaml"),
    show_default=True,
    help="The scenario to write.",
)
@click.option(
    "--out", type=PATH, default=Path("torchaos-shrink"), show_default=True, help="The folder for the runs of the tries."
)
@QUIET
def shrink(folder: Path, tries: int, fails: int, output: Path, out: Path, quiet: bool) -> None:
    """Find the smallest set of a game day's faults that still fails.

    RUN_DIR is a run that failed, or a game day, whose first failed round is used."""
    if fails > tries:
        raise UsageError(f"--fails {fails} of --tries {tries} is impossible; write a smaller number")
    found = RunDir(_failed_round(folder.absolute())).check()
    home = (out / f"{found.root.name}-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    task = Shrink.of(found, judge(found), home, tries, fails, (lambda text: None) if quiet else click.echo)
    with signals() as interrupted:
        interrupted.ends(task.child)
        smallest = task()
    if smallest is None:
        click.echo(f"with all its faults, it did not fail again in {fails} of {tries} tries, so chance decides")
        sys.exit(ExitCode.INCONCLUSIVE)
    try:
        write_atomically(output, task.evidence() + dumped(smallest))
    except OSError as error:
        raise UsageError(f"{output}: it can't be written: {error.strerror}; choose another --output") from error
    click.echo(f"{len(smallest['faults'])} of {len(task.scenario['faults'])} faults are needed: {output}")


def _failed_round(folder: Path) -> Path:
    if not (folder / "day.json").is_file():
        return folder
    for path in sorted((folder / "rounds").glob("[0-9]*/score.json")):
        for run in sorted((path.parent / "run").iterdir() if (path.parent / "run").is_dir() else ()):
            if run.is_dir() and judge(RunDir(run).check()).exit_code == ExitCode.FAILED:
                return run
    raise UsageError(f"{folder}: no round of this game day failed, or its run directory is gone")
