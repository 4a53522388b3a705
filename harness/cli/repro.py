"""torchaos repro: a script that shows a finding without torchaos."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from torchaos.harness.analysis.verdict.verdict import verdict_of
from torchaos.harness.cli.options import PATH, RUN_DIR, cli
from torchaos.harness.cli.run_output import Command
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.repro.case import case_of, script_of


class _Repro(Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [re.sub("^--out(?=$|=)", "--output", word) for word in args])  # its earlier name


@cli.command(cls=_Repro)
@RUN_DIR
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="The script's file; by default RUN_DIR's name with -repro.py.",
)
@click.option(
    "--promise", default="", metavar="TEXT", help="A quotation from the trainer's documentation, with its source."
)
def repro(folder: Path, output: Path | None, promise: str) -> None:
    """Write a script that shows a finding without torchaos.

    The script runs the job once as a control and three times with the kill. It exits with 0 if the finding shows each
    time. If only torchaos can show the finding, the command says so, with exit code 3."""
    run_dir = RunDir(folder.absolute()).check()
    run = Record.load(run_dir)
    twins = [Record.load(RunDir(path)) for path in sorted(run_dir.twins.iterdir())] if run_dir.twins.is_dir() else []
    result = verdict_of(run, twins, str(run_dir.root))
    try:
        text = script_of(case_of(run, twins, result, promise))
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from error
    path = output or Path(f"{run_dir.root.name}-repro.py")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: the script can't be written: {error.strerror}; choose another with -o") from error
    what = (
        "the run passed, so the script should not reproduce anything"
        if result.verdict is Verdict.PASSED
        else result.reason
    )
    click.echo(f"{path}: {what}")
