"""`torchaos validate`. It runs at each commit, so it imports only what reads a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from torchaos.harness.cli.options import AS_JSON, FILES, JOB, SET, WithCommand, cli
from torchaos.harness.contracts import UsageError
from torchaos.harness.record.result import ExitCode
from torchaos.harness.running.planner.job import check_script
from torchaos.harness.scenario import load
from torchaos.harness.scenario.other_job import other_job
from torchaos.harness.scenario.yaml_source import Source, read


@cli.command(cls=WithCommand)
@FILES
@JOB
@SET
@AS_JSON
def validate(
    files: Sequence[Path], job_file: Path | None, overrides: Sequence[str], as_json: bool, given: Sequence[str] = ()
) -> None:  # fmt: skip
    """Check files without looking at the machine. FILES: scenarios, game days, gates, or folders of them. COMMAND: as
    for `torchaos run`."""
    errors: dict[Path, str] = {}
    job = other_job(job_file, given, None)
    for file in files:
        errors[file] = _mistakes_in(file, overrides, job)
        if not errors[file] and not as_json:
            click.echo(f"{file}: well-formed")
    bad = [text for text in errors.values() if text]
    if as_json:
        click.echo(json.dumps([{"file": str(file), "mistakes": text} for file, text in errors.items()]))
        sys.exit(ExitCode.USAGE if bad else ExitCode.PASSED)
    if bad:
        raise UsageError("\n".join(bad))


def _mistakes_in(file: Path, overrides: Sequence[str], job: Source | None) -> str:
    """A line for each mistake. Empty if the file is well-formed."""
    try:
        _check(file, overrides, job)
    except UsageError as error:
        return str(error)
    return ""


def _check(file: Path, overrides: Sequence[str], job: Source | None) -> None:
    """Raises UsageError with a line for each mistake."""
    data = read(file).data
    if "scenario" not in data and "gameday" in data:
        from torchaos.harness.gameday.loader import load as load_day

        check_script(load_day(file, overrides).job, file)
    elif "scenario" not in data and "gate" in data:
        from torchaos.harness.release.gate.loader import load as load_gate

        load_gate(file)
    else:
        check_script(load(file, overrides, job).job, job.path if job else file)
