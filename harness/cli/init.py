"""torchaos init: a first scenario for the user's own job."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from torchaos.harness.cli import manage
from torchaos.harness.cli.options import PATH, QUIET, WithCommand, cli
from torchaos.harness.cli.run import signals
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode
from torchaos.harness.reporting.terminal.live import Live
from torchaos.harness.rollback.orphaned_runs import before_a_run
from torchaos.harness.running.housekeeping import at_work
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.scaffold.job_draft import AFTER_A_LOOK, EXAMPLE, UNKNOWN, Draft, draft_of, scenario_text
from torchaos.harness.running.scaffold.observed_run import HealthyRun, chosen_in, seen_in
from torchaos.harness.scenario.field_types import NAME
from torchaos.harness.scenario.loader import load

_STEP, _TIMEOUT_S = 18, 600.0  # used unless the run without faults shows better values
_EVERY = re.compile(r"--(?:save|ckpt|checkpoint)\w*?[-_](?:every|steps|interval|freq)[\w-]*[ =](\d+)(?= |$)")


@cli.command(cls=WithCommand)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    default=Path("kill-rank.yaml"),
    show_default=True,
    help="The scenario to write.",
)
@click.option("--no-look", is_flag=True, help="Do not run the job.")
@QUIET
def init(output: Path, no_look: bool, quiet: bool, given: Sequence[str] = ()) -> None:
    """Write a first scenario for your job, and show what was seen of it. COMMAND starts your job, such as `torchaos
    init -- torchrun train.py`. The job's script is read, and then the job is run once without a fault. No file is ever
    overwritten."""
    draft = draft_of(given or EXAMPLE, Path.cwd())
    if given and draft.script and not draft.script.path.is_file():
        raise UsageError(f"{draft.script.path}: there is no such file; correct the command, or change the folder")
    draft.cwd = os.path.relpath(draft.cwd, output.parent)
    step, check = _step(draft)
    text = scenario_text(_name(output), draft, step, _TIMEOUT_S)
    _write_new(output, text)
    click.echo(f"{output}: written")
    _tell("assumed", draft.assumed)
    _tell("check", draft.to_check)
    if not given:
        _tell("check", ["it has an example for a command; write yours there"])
        return
    if draft.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
        no_look = True
        _tell("look", ["the job was not run, because that needs nodes; in an allocation (salloc), init runs it"])
        if draft.nodes <= 1:
            _tell("look", ["it has one node: without the line `launcher: slurm`, it is run on this machine"])
    code = ExitCode.PASSED if no_look else _look(output, draft, text, quiet)
    if no_look:
        _tell("check", [check])
        _tell("left out", [f"{' and '.join(AFTER_A_LOOK)}: comments in the file, as {UNKNOWN}"])
    _tell("next", [f"torchaos plan {output}", " ".join([*draft.allocation, f"torchaos run {output}"])])
    sys.exit(code)


def _step(draft: Draft) -> tuple[int, str]:
    """The step for the kill without a look at the job, and what the user must check of it. It is between two
    checkpoints if an option of the command says how often the job saves."""
    every = _EVERY.search(shlex.join(draft.command))
    if every is None or int(every[1]) < 2:
        return _STEP, f"step {_STEP} for the kill: it must lie between two checkpoints, before the job's end"
    saves = int(every[1])
    step = _STEP if saves < _STEP and _STEP % saves else 2 * saves + saves // 2
    before = step - step % saves
    told = f"step {step} for the kill: between the checkpoints of {before} and {before + saves}, by {every[0]}"
    return step, f"{told}; it must be before the job's end"


def _name(output: Path) -> str:
    """The scenario's name: that of its file, so that the history of two jobs is not mixed."""
    return output.stem if re.fullmatch(NAME, output.stem) else "kill-rank"


def _write_new(path: Path, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path}: it exists, and is never overwritten; name another file with -o") from None
    except OSError as error:
        raise UsageError(f"{path}: it can't be written: {error.strerror}; name another file with -o") from error


def _tell(label: str, lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"  {label:<9} {line}")


def _look(output: Path, draft: Draft, text: str, quiet: bool) -> ExitCode:
    """Runs the job once without faults, prints what was seen, and puts the values that were seen into the scenario."""
    plan = make_plan(load(output), output, 0)
    look = HealthyRun(plan, partial(Live, console=Console(stderr=True, quiet=quiet)))
    runs = f"runs the job once without faults, for at most {_TIMEOUT_S / 60:.0f} min; with --no-look it doesn't"
    _tell("look", ["at a run without faults, which is kept from before" if look.is_made else runs])
    with signals() as interrupted, at_work([plan.scenario]), TemporaryDirectory(prefix="torchaos-") as scratch:
        manage.tell(before_a_run(given_up=lambda: interrupted.reason is not None))
        interrupted.ends(look)
        record = look(Path(scratch))
    if look.problem:
        _tell(
            "failed",
            [look.problem, "correct the job first: a scenario proves nothing about a job that fails without a fault"],
        )
    if record is None:
        return ExitCode.INCONCLUSIVE
    blind: dict[str, str] = {}
    for one in seen_in(record):
        _tell("not seen" if one.blind else "seen", [f"{one.name}: {one.words}"])
        blind |= dict.fromkeys(one.blind, f"{one.name} were not seen")
    _tell("left out", [f"{name}: {why}" for name, why in blind.items()])
    moment = chosen_in(record)
    if moment:
        _tell("kill", [moment.says] if moment.says else [])
        _tell("not shown", moment.misses)
    step = moment.step if moment else _STEP
    better = scenario_text(_name(output), draft, step, _timeout_s(record), blind)
    if output.read_text(encoding="utf-8") == text:
        write_atomically(output, better)
    return ExitCode.INCONCLUSIVE if look.problem else ExitCode.PASSED


def _timeout_s(run: Record) -> float:
    """The time-out in seconds, rounded up to minutes: long enough for the job and a recovery on a busy machine."""
    took_s = run.events[-1].mono_s - run.events[0].mono_s if run.events else 0.0
    return max(_TIMEOUT_S, 60.0 * math.ceil((3 * took_s + 120) / 60))
