"""The commands that change nothing: judge, events, validate, list, doctor, schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from pydantic import BaseModel
from rich.console import Console

from torchaos.harness import registry
from torchaos.harness.cli.options import FILES, JSON, JUNIT, RUN_DIR, RUN_DIRS, SET, cli
from torchaos.harness.cli.run import write_reports
from torchaos.harness.contracts import UsageError
from torchaos.harness.gameday.grammar import GameDay
from torchaos.harness.gameday.loader import load as load_day
from torchaos.harness.judging.verdict.verdict import judge as judge_folder
from torchaos.harness.record.events.journal import read_journal
from torchaos.harness.record.result import ExitCode, worst
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import ready
from torchaos.harness.release.gate.grammar import Gate
from torchaos.harness.release.gate.loader import load as load_gate
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner.job import check_script
from torchaos.harness.scenario import load
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.schema import DIALECT, json_schema
from torchaos.harness.scenario.yaml_source import read
from torchaos.harness.telling.terminal import console as show

_MODELS: dict[str, type[BaseModel]] = {"scenario": Scenario, "gameday": GameDay, "gate": Gate}
_HOME = "https://github.com/torchaos/torchaos/schema"  # of the names of the schemas


@cli.command()
@RUN_DIRS
@JUNIT
@JSON
def judge(folders: Sequence[Path], junit_file: Path | None, json_file: Path | None) -> None:
    """Judge run directories again, offline."""
    results = [judge_folder(RunDir(folder.absolute()).check()) for folder in folders]
    for result in results:
        show.show(result, Console())
    write_reports(results, junit_file, json_file)
    sys.exit(worst([ExitCode(result.exit_code) for result in results]))


@cli.command()
@RUN_DIR
def events(folder: Path) -> None:
    """Print the journal of a run as lines of JSON. All events, in order of time."""
    damaged: list[str] = []
    for event in read_journal(RunDir(folder.absolute()).check().events, damaged):
        click.echo(event.to_line(), nl=False)
    for place in damaged:
        click.echo(f"{place} is damaged", err=True)


@cli.command()
@FILES
@SET
def validate(files: Sequence[Path], overrides: Sequence[str]) -> None:
    """Check files without looking at the machine. FILES: scenarios, game days or gates, or folders of *.yaml files."""
    errors = []
    for file in _files_in(files):
        try:
            _check(file, overrides)
        except UsageError as error:
            errors.append(str(error))
        else:
            click.echo(f"{file}: well-formed")
    if errors:
        raise UsageError("\n".join(errors))


def _check(file: Path, overrides: Sequence[str]) -> None:
    """Raises UsageError with a line for each mistake."""
    data = read(file).data
    if "scenario" not in data and "gameday" in data:
        check_script(load_day(file, overrides).job, file)
    elif "scenario" not in data and "gate" in data:
        load_gate(file)
    else:
        check_script(load(file, overrides).job, file)


def _files_in(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(one for one in path.iterdir() if one.suffix in (".yaml", ".yml"))
            if not found:
                raise UsageError(f"{path}: it holds no scenario files (*.yaml); give a file, or another folder")
            yield from found
        else:
            yield path


@cli.command("list")
@click.argument("kinds", nargs=-1, type=click.Choice(["scenarios", *registry.GROUPS]), metavar="[KIND]...")
def list_(kinds: Sequence[str]) -> None:
    """List ready scenarios, faults, assertions and other parts. KIND: scenarios, injectors, assertions, conditions,
    launchers or formats."""
    console = Console()
    if not kinds or "scenarios" in kinds:
        texts = {name: read(ready.folder() / f"{name}.yaml").data for name in ready.names()}
        show.ready_scenarios({name: str(data.get("description", "")) for name, data in texts.items()}, console)
    show.catalogue({one: registry.all_of(one) for one in registry.GROUPS if one in kinds or not kinds}, console)


@cli.command()
def doctor() -> None:
    """Show what this machine can do, what is missing, and how to get it.

    Exit code 0 if scenarios can run, although some may need a part that is missing."""
    findings = [capabilities.check(name) for name in capabilities.CHECKS]
    for finding in findings:
        click.echo(
            f"{'ok     ' if finding.present else 'missing'}  {finding.name:<10} {finding.detail}"
            + ("" if finding.present else f" -> {finding.remedy}")
        )
    lacking = [finding.name for finding in findings if not finding.present]
    needed = [name for name in lacking if name in capabilities.NEEDED]
    if needed:
        click.echo(f"\nNo scenario can run without {', '.join(needed)}.")
    elif lacking:
        click.echo(f"\nScenarios can run. Some need what is missing: {', '.join(lacking)}.")
    sys.exit(ExitCode.USAGE if needed else ExitCode.PASSED)


@cli.command()
@click.argument("kind", type=click.Choice([*_MODELS]), default="scenario", metavar="[KIND]")
def schema(kind: str) -> None:
    """Print the JSON Schema of scenario files, for editors.

    KIND: scenario, gameday or gate."""
    found = json_schema(_MODELS[kind])
    click.echo(json.dumps({"$schema": DIALECT, "$id": f"{_HOME}/{kind}.json", **found}, indent=1))
