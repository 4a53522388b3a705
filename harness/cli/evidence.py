"""The commands that read what a job left: `torchaos diagnose` and `torchaos verify`."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from torchaos.harness.analysis.hangs import ranks_in_words
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Files, locate
from torchaos.harness.checkpoints.layout import Checkpoint, Problem, Trouble
from torchaos.harness.checkpoints.verify import Manifests, Verified
from torchaos.harness.checkpoints.verify import verify as verify_one
from torchaos.harness.cli.options import AS_JSON, RunFolder, cli, is_told
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.diagnosis import blame, flight_recorder
from torchaos.harness.monitoring.diagnosis.diagnosis import Diagnosis
from torchaos.harness.monitoring.diagnosis.kernel_trace import watch
from torchaos.harness.monitoring.diagnosis.live_job import of_job, ranks_of
from torchaos.harness.monitoring.diagnosis.wait_graph import read_stamps
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode, worst
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
        found.problems += map(str, watch({rank: one.pid for rank, one in ranks_of(pid).items()}, kernel, functions))
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
                f"{folder}: its job was not ended in a hang, and it did not record its collectives; assert "
                "hang_detected in its scenario to have them recorded"
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


_SHOWN = 20  # the most problems of a checkpoint that are printed


@cli.command()
@click.argument("path")
@click.option("--all", "every", is_flag=True, help="All checkpoints under PATH, not only the newest.")
@click.option(
    "--manifest", type=RunFolder(), metavar="DIR", help="The run directory (or a folder of manifests) of the job."
)
@AS_JSON
def verify(path: str, every: bool, manifest: Path | None, json_file: Path | None) -> None:
    """Check a checkpoint for damage. PATH is a checkpoint, or a folder or URL whose newest checkpoint is checked. The
    command checks the structure, the checkpoint's own CRCs, NaN, and the digests that were taken at the save. Nothing
    in it is executed. Exit code 0: whole; 1: damaged or incomplete; 2: of an unknown kind, or it can't be told, with
    the reason, or a file that is not read may be newer; 3: bad usage, such as a path that does not exist or an empty
    folder."""
    manifests = Manifests.load(manifest) if manifest else None
    files, where = locate(path)
    try:
        results = [verify_one(files, one, manifests) for one in _chosen(files, where, every)]
        trackers = [tracker for tracker in formats.trackers(files, where) if tracker.target is None]
        beside = [] if [one.layout.path for one in results] == [where] else [*formats.unread_files(files, where)]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; give a checkpoint, or a folder of them") from error
    finally:
        files.close()
    if not results:
        raise UsageError(f"{path}: it is empty; give a checkpoint, or a folder of them")
    lost = [f"{tracker.path}: it names {tracker.text[:80]!r}, which does not exist" for tracker in trackers]
    code = worst([*(result.code for result in results), *([ExitCode.FAILED] if lost else [])])
    newest = max((one.layout.step for one in results if one.layout.step is not None), default=None)
    if any(every or _may_be_newer(file, newest) for file in beside):
        code = worst([code, ExitCode.INCONCLUSIVE])
    types = formats.types_of(beside)
    if not is_told(
        json_file, {"checkpoints": [_as_json(result) for result in results], "trackers": lost, "unread": types}
    ):
        for one in results:
            _show(one)
        for text in lost:
            click.echo(f"damaged: {text}")
        if beside:
            of_types = f"{counted(len(beside), 'file')} of the type {', '.join(types)}"
            click.echo(f"not read: {of_types}, which may hold checkpoints")
    sys.exit(code)


def _chosen(files: Files, where: str, every: bool) -> Sequence[str]:
    """The checkpoint of the highest step, and the damaged checkpoints of unknown step, because any of these may be the
    newest. Checkpoints whose names mark them as unfinished are left out."""
    found = formats.find(files, where)
    if not found:
        return [where] if files.is_dir(where) and files.names(where) else []
    if every or found == [where]:
        return [one.path for one in formats.in_order([_outline(files, path) for path in found])]
    finished = [path for path in found if not formats.why_unfinished(files, path)] or found
    layouts = formats.in_order([_outline(files, path) for path in finished])
    torn = [one.path for one in layouts if one.step is None and any(not each.is_blind for each in one.problems)]
    return [*_newest(files, layouts), *(torn if layouts[-1].step is not None else [])]


def _may_be_newer(path: str, step: int | None) -> bool:
    told = formats.format.number_in(posixpath.basename(path))
    return told is None or step is None or told > step


def _newest(files: Files, layouts: Sequence[Checkpoint]) -> Sequence[str]:
    newest = [one for one in layouts if one.step == layouts[-1].step]
    known = [one.path for one in newest if one.format != formats.UNKNOWN] or [one.path for one in newest]
    if len(known) == 1 or (files.is_dir(known[-1]) and newest[-1].step is not None):
        return known[-1:]
    # Several of one step: each is a checkpoint of its own, or they are the parts of one of unknown layout.
    alone = all(formats.format.stands_alone(formats.read(files, path)) for path in known)
    return known[-1:] if alone else [posixpath.commonpath(known)]


def _outline(files: Files, path: str) -> Checkpoint:
    step = formats.format.number_in(path.rpartition("/")[2])
    return Checkpoint(path, "", step) if step is not None else formats.read(files, path)


def _show(verified: Verified) -> None:
    layout = verified.layout
    step = f", step {layout.step}" if layout.step is not None else ""
    about = (
        ""
        if layout.format == formats.UNKNOWN
        else f" ({layout.format}{step}, {counted(len(layout.tensors), 'tensor')})"
    )
    click.echo(f"{verified.answer.value}: {layout.path}{about}")
    for problem in verified.problems[:_SHOWN]:
        click.echo(f"  {'not read' if problem.is_blind else problem.kind.value}: {problem.text}")
    if len(verified.problems) > _SHOWN:
        click.echo(f"  and {len(verified.problems) - _SHOWN} more, see --json")
    for text in verified.unseen:
        click.echo(f"  unseen: {text}")
    inside = formats.counted_step(layout)
    if None not in (inside, layout.step) and abs((inside or 0) - (layout.step or 0)) > 1:  # some jobs count from 0
        click.echo(f"  its name says step {layout.step}, and its contents say step {inside}")
    if layout.missing and layout.tensors:
        click.echo(f"  not found in it: {', '.join(layout.missing)}")
    if not verified.manifest and verified.code is ExitCode.PASSED:
        click.echo("  checked by its CRCs; without a manifest, a part of another save can't be found")


def _as_json(verified: Verified) -> dict[str, Any]:
    layout = verified.layout
    return {
        "path": layout.path, "verdict": verified.answer.value, "format": layout.format, "step": layout.step,
        "tensors": len(layout.tensors), "bytes": layout.size, "manifest": verified.manifest, "missing": layout.missing,
        "opaque": layout.opaque, "unseen": verified.unseen,
        "problems": [_problem(problem) for problem in verified.problems],
    }  # fmt: skip


def _problem(problem: Problem) -> dict[str, Any]:
    known = {name: value for name, value in asdict(problem).items() if value is not None}
    return {**known, "kind": Trouble(problem.kind).value}
