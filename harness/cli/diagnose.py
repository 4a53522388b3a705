"""`torchaos diagnose`: which ranks caused a hang."""

from __future__ import annotations

from pathlib import Path

import click

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.analysis.hangs import ranks_in_words
from torchaos.harness.cli.options import AS_JSON, RunFolder, cli
from torchaos.harness.cli.run_output import is_told
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.diagnosis import blame, flight_recorder
from torchaos.harness.monitoring.diagnosis.diagnosis import Diagnosis
from torchaos.harness.monitoring.diagnosis.kernel_trace import watch
from torchaos.harness.monitoring.diagnosis.live_job import of_job, ranks_of
from torchaos.harness.monitoring.diagnosis.recorded_calls import read_stamps
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir


@cli.command()
@click.argument("folder", required=False, type=RunFolder(), metavar="[DIR]")
@click.option("--pid", type=int, metavar="PID", help="Look at the live job of the torchrun that runs as PID.")
@click.option(
    "--kernel",
    type=click.FloatRange(0.1, 600),
    metavar="SECONDS",
    help="With --pid: also watch the kernel for this time.",
)
@click.option("--function", "functions", multiple=True, metavar="LIB:SYMBOL", help="With --kernel: calls to time.")
@AS_JSON
def diagnose(
    folder: Path | None, pid: int | None, kernel: float | None, functions: tuple[str, ...], json_file: Path | None
) -> None:
    """Name the ranks that hold up a job that hangs, with the evidence.

    DIR holds the Flight Recorder dumps of all ranks (files that end in the rank's number), or is a run directory.
    """
    if pid is None and kernel is not None:
        raise UsageError("--kernel looks at a live job: give the --pid of its torchrun")
    if functions and kernel is None:
        raise UsageError("--function times calls while --kernel watches: give --kernel SECONDS too")
    found = _diagnosis(folder, pid)
    if pid is not None and kernel is not None:
        found.problems += watch({rank: one.pid for rank, one in ranks_of(pid).items()}, kernel, functions)
    if not is_told(json_file, found.to_json()):
        click.echo("\n".join(found.lines()))


def _diagnosis(folder: Path | None, pid: int | None) -> Diagnosis:
    if pid is not None:
        if folder is not None and not (folder / "agent" / "stamps").is_dir():
            raise UsageError(f"{folder}: with --pid, give the directory of that job's run, or none")
        return of_job(pid, folder / "agent" / "stamps" if folder else None)
    if folder is None:
        raise UsageError("nothing to look at; give a directory of Flight Recorder dumps, a run directory, or --pid")
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a directory; give the directory that holds the dumps of all ranks")
    run = RunDir(folder)
    if run.plan.is_file():
        if not run.stamps.is_dir():
            if ends := list(Record.load(run).of_kind(Kind.HANG_AT_END)):
                return _at_end(ends[-1])
            raise UsageError(
                f"{folder}: this run has no stamps of collectives, and its job was not ended in a hang; only an "
                "assertion that needs them, such as hang_detected, makes a run keep stamps"
            )
        if Record.load(run).exit_code == 0:  # a rank that left by os._exit may have left an open stamp
            return Diagnosis(summary="the job ended with exit code 0: in the end no rank hung")
        return blame.diagnose(read_stamps(run.stamps))
    return blame.diagnose(flight_recorder.read_folder(folder))


def _at_end(event: Event) -> Diagnosis:
    """What the ranks did when the run had to end its job."""
    found = Diagnosis(problems=[str(text) for text in event.data["problems"]])
    found.culprits = set(event.data["culprits"])
    found.summary = f"when the run ended the job, {ranks_in_words(event.data['ranks']) or 'no rank was alive'}"
    return found
