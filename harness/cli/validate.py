"""`torchaos validate`. It runs at each commit, so it imports only what reads a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from torchaos.harness.cli.options import AS_JSON, FILES, JOB, SET, WithCommand, cli, is_told
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import ExitCode
from torchaos.harness.running.planner import check_script, check_targets
from torchaos.harness.scenario.checks import Tell, check
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.loader import kind_in, load_as, other_job
from torchaos.harness.scenario.yaml_source import Source, read


@cli.command(cls=WithCommand)
@FILES
@JOB
@SET
@AS_JSON
def validate(
    files: Sequence[Path], job_file: Path | None, overrides: Sequence[str], json_file: Path | None,
    given: Sequence[str] = (),
) -> None:  # fmt: skip
    """Check files without looking at the machine. FILES: scenarios, game days, gates, or folders of them. COMMAND: as
    for `torchaos run`."""
    job = other_job(job_file, given, None)
    errors = {file: _mistakes_in(file, overrides, job) for file in files}
    bad = [text for text in errors.values() if text]
    if is_told(json_file, [{"file": str(file), "mistakes": text} for file, text in errors.items()]):
        sys.exit(ExitCode.USAGE if bad else ExitCode.PASSED)
    for file in (file for file, text in errors.items() if not text):
        click.echo(f"{file}: well-formed")
    if bad:
        raise UsageError("\n".join(bad))


def _mistakes_in(file: Path, overrides: Sequence[str], job: Source | None) -> str:
    """A line for each mistake. Empty if the file is well-formed."""
    try:
        if not (kind := kind_in(read(file).data)):
            raise UsageError(f"{file}:1:1: this is no scenario, game day or gate; give another file")
        if kind == "gameday":
            from torchaos.harness.gameday.fault_schedule import load as load_day

            load_day(file, overrides, lambda day, tell: check_script(day.job, day.launcher, file, tell))
        elif kind == "gate":
            from torchaos.harness.release.gate_file import load as load_gate

            load_gate(file)
        else:
            load_as(Scenario, file, overrides, partial(_check, job.path if job else file), job)
    except UsageError as error:
        return str(error)
    return ""


def _check(file: Path, scenario: Scenario, tell: Tell) -> None:
    """The checks of a scenario. `file`: the file with its job."""
    check(scenario, tell)
    check_script(scenario.job, scenario.launcher, file, tell)
    check_targets(scenario, file, tell)
