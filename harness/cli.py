"""The command line. Each command is a thin layer: it reads what the user gave, calls the engine, and prints.

Exit codes: 0 passed, 1 an assertion failed, 2 inconclusive, 3 bad usage or scenario, 4 rollback incomplete,
5 internal error; of several scenarios the worst counts, in the order 3 > 4 > 5 > 1 > 2 > 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from torchaos.harness import capabilities, registry
from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.engine.scenario_run import ScenarioRun, error_result
from torchaos.harness.judging.verdict import judge as judge_folder
from torchaos.harness.plan import Plan
from torchaos.harness.planner import make_plan
from torchaos.harness.report import console as show
from torchaos.harness.report import jsonfile, junit
from torchaos.harness.report.live import Live
from torchaos.harness.report.placeholder import placeholder_result
from torchaos.harness.result import ExitCode, Result, worst
from torchaos.harness.rundir import RunDir
from torchaos.harness.scenario import load
from torchaos.harness.scenario.schema import json_schema

PATH = click.Path(path_type=Path)
FILES = click.argument("files", nargs=-1, required=True, type=PATH)
SEED = click.option("--seed", type=int, help="Use this seed instead of the scenario's.")
ATTACH = click.option("--attach", type=int, metavar="PID", help="Use the torchrun that runs as PID, not job.command.")
JUNIT = click.option("--junit", "junit_file", type=PATH, help="Write JUnit XML here.")
JSON = click.option("--json", "json_file", type=PATH, help="Write all results as JSON here.")
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value, such as job.timeout=2m."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchaos")
def cli() -> None:
    """Chaos engineering for distributed PyTorch training."""


@dataclass(frozen=True)
class Planned:
    plan: Plan
    folder: RunDir
    source: Path
    options: tuple[str, ...]  # of the command line, as far as they change what is run


@cli.command()
@FILES
@click.option("--out", type=PATH, default=Path("torchaos-runs"), help="Where run directories go.", show_default=True)
@SEED
@click.option("--repeat", type=click.IntRange(1), default=1, help="Run each so often, with seeds counted up.")
@JUNIT
@JSON
@SET
@ATTACH
def run(
    files: Sequence[Path], out: Path, seed: int | None, repeat: int, junit_file: Path | None, json_file: Path | None,
    overrides: Sequence[str], attach: int | None,
) -> None:  # fmt: skip
    """Run scenarios against live jobs and judge them."""
    console = Console()
    runs = _apart([one for file in files for one in _planned(file, overrides, seed, repeat, attach, out)])
    pending = [placeholder_result(one.plan, one.folder.root) for one in runs]
    _write(pending, junit_file, json_file)  # gates fail closed: until a scenario is judged, it is an error
    results: list[Result] = []
    with _signals() as interrupted:
        for one in runs:
            if interrupted.reason:
                break
            results.append(_run_one(one, console, interrupted))
            _write([*results, *pending[len(results) :]], junit_file, json_file)
    if len(results) > 1:
        show.summary(results, console)
    codes = [ExitCode(result.exit_code) for result in results]
    sys.exit(worst([*codes, ExitCode.INCONCLUSIVE] if len(results) < len(runs) else codes))


def _write(results: Sequence[Result], junit_file: Path | None, json_file: Path | None) -> None:
    try:
        if junit_file:
            junit.write(results, junit_file)
        if json_file:
            jsonfile.write(results, json_file)
    except OSError as error:
        raise UsageError(f"{error.filename}: the report can't be written: {error.strerror}") from error


def _planned(
    file: Path, overrides: Sequence[str], seed: int | None, repeat: int, attach: int | None, out: Path
) -> Iterator[Planned]:
    scenario = load(file, overrides)
    first = scenario.seed if seed is None else seed
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(repeat):
        plan = make_plan(scenario, file, first + number, attach)
        name = f"{plan.scenario}-s{plan.seed}-{stamp}-{os.getpid()}"
        options = tuple(word for text in overrides for word in ("--set", text))
        options += ("--attach", str(attach)) if attach is not None else ()
        yield Planned(plan, RunDir((out / name).absolute()), file, options)


def _apart(runs: Sequence[Planned]) -> list[Planned]:
    """Each with a folder of its own, also where two files describe the same scenario with the same seed."""
    seen = Counter[Path]()
    found = []
    for one in runs:
        seen[one.folder.root] += 1
        again = f"-{number}" if (number := seen[one.folder.root]) > 1 else ""
        found.append(replace(one, folder=RunDir(one.folder.root.with_name(one.folder.root.name + again))))
    return found


def _run_one(one: Planned, console: Console, interrupted: _Interrupt) -> Result:
    again = ["torchaos", "run", str(one.source), "--seed", str(one.plan.seed), *one.options]
    watcher = partial(Live, console=console)
    scenario_run = ScenarioRun(one.plan, one.folder, one.source, again, watcher)
    interrupted.target = scenario_run
    try:
        result = scenario_run()
    except ChaosError as error:
        console.print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
        code = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.INTERNAL
        return error_result(one.plan, one.folder, error, code)
    show.show(result, console)
    return result


@cli.command()
@FILES
@SEED
@SET
@ATTACH
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(files: Sequence[Path], seed: int | None, overrides: Sequence[str], attach: int | None, as_json: bool) -> None:
    """Resolve everything and change nothing: what a run would do, to whom, and when."""
    for file in files:
        for one in _planned(file, overrides, seed, 1, attach, Path()):
            if as_json:
                click.echo(one.plan.to_json())
            else:
                show.plan(one.plan, Console())


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=PATH)
@JUNIT
@JSON
def judge(folders: Sequence[Path], junit_file: Path | None, json_file: Path | None) -> None:
    """Judge run directories again, offline."""
    results = [judge_folder(RunDir(folder.absolute()).check()) for folder in folders]
    for result in results:
        show.show(result, Console())
    _write(results, junit_file, json_file)
    sys.exit(worst([ExitCode(result.exit_code) for result in results]))


@cli.command()
@FILES
@SET
def validate(files: Sequence[Path], overrides: Sequence[str]) -> None:
    """Check scenarios without looking at the machine."""
    errors = []
    for file in files:
        try:
            load(file, overrides)
        except UsageError as error:
            errors.append(str(error))
        else:
            click.echo(f"{file}: well-formed")
    if errors:
        raise UsageError("\n".join(errors))


@cli.command("list")
def list_() -> None:
    """What there is to use: injectors, assertions, conditions and launchers, with their parameters."""
    show.catalogue({group: registry.all_of(group) for group in registry.GROUPS}, Console())


@cli.command()
def doctor() -> None:
    """What this machine can do, what is missing, and how to get it."""
    findings = [capabilities.check(name) for name in capabilities.CHECKS]
    for one in findings:
        click.echo(
            f"{'ok     ' if one.present else 'missing'}  {one.name:<10} {one.detail}"
            + ("" if one.present else f" -> {one.remedy}")
        )
    sys.exit(ExitCode.PASSED if all(one.present for one in findings if one.name != "root") else ExitCode.USAGE)


@cli.command()
def schema() -> None:
    """The JSON Schema of scenario files, for editors."""
    click.echo(json.dumps(json_schema(), indent=1))


class _Interrupt:
    """What the signal handlers set: the run under way is ended in order, rolled back and judged; no other starts."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.target: ScenarioRun | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.reason = f"{signal.Signals(number).name} was received"
        if self.target:
            self.target.stop(self.reason)


@contextmanager
def _signals() -> Iterator[_Interrupt]:
    interrupt = _Interrupt()
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """The entry point: an error meant for the user is one message and exit code 3, never a traceback."""
    try:
        cli.main(standalone_mode=False)
    except UsageError as error:
        _fail(str(error), ExitCode.USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except click.Abort:
        sys.exit(ExitCode.INCONCLUSIVE)
    except ChaosError as error:
        _fail(str(error), ExitCode.INTERNAL)
    except Exception:  # a bug of ours: here, and only here, the traceback is what the reader needs
        traceback.print_exc()
        _fail("internal error: please report it with the lines above", ExitCode.INTERNAL)


def _fail(text: str, code: ExitCode) -> None:
    click.echo(f"error: {text}" if "\n" not in text else text, err=True)
    sys.exit(code)
