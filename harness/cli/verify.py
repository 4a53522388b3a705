"""torchaos verify: checks whether a checkpoint is as it was written, and has everything that a resume needs."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Files, locate
from torchaos.harness.checkpoints.layout import Checkpoint, Problem, Trouble
from torchaos.harness.checkpoints.verify import Manifests, Verified
from torchaos.harness.checkpoints.verify import verify as verify_one
from torchaos.harness.cli.options import AS_JSON, PATH, cli
from torchaos.harness.cli.run_output import is_told
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import counted
from torchaos.harness.record.result import ExitCode, worst

_SHOWN = 20  # so many problems of a checkpoint are printed


@cli.command()
@click.argument("path")
@click.option("--all", "every", is_flag=True, help="All checkpoints under PATH, not only the newest.")
@click.option("--manifest", type=PATH, metavar="DIR", help="The run directory (or a folder of manifests) of the job.")
@AS_JSON
def verify(path: str, every: bool, manifest: Path | None, json_file: Path | None) -> None:
    """Check a checkpoint for damage. PATH is a checkpoint, or a folder or URL whose newest checkpoint is checked. The
    command checks the structure, the checkpoint's own CRCs, NaN, and the digests that were taken at the save. Nothing
    in it is executed. Exit code 0: whole; 1: damaged or incomplete; 2: of an unknown kind, or it can't be told, with
    the reason; 3: bad usage, such as a path that does not exist or an empty folder."""
    manifests = Manifests.load(manifest) if manifest else None
    files, where = locate(path)
    try:
        results = [verify_one(files, one, manifests) for one in _chosen(files, where, every)]
        trackers = [tracker for tracker in formats.trackers(files, where) if tracker.target is None]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; give a checkpoint, or a folder of them") from error
    finally:
        files.close()
    if not results:
        raise UsageError(f"{path}: it is empty; give a checkpoint, or a folder of them")
    lost = [f"{tracker.path}: it names {tracker.text[:80]!r}, which does not exist" for tracker in trackers]
    code = worst([*(result.code for result in results), *([ExitCode.FAILED] if lost else [])])
    if not is_told(json_file, {"checkpoints": [_as_json(result) for result in results], "trackers": lost}):
        for one in results:
            _show(one)
        for text in lost:
            click.echo(f"damaged: {text}")
    sys.exit(code)


def _chosen(files: Files, where: str, every: bool) -> Sequence[str]:
    """The checkpoint of the highest step, and those that are damaged and whose step is not known: any may be the
    newest. Checkpoints whose names mark them as unfinished are left out."""
    found = formats.find(files, where)
    if not found:
        return [where] if files.is_dir(where) and files.names(where) else []
    if every or found == [where]:
        return found
    finished = [path for path in found if not formats.why_unfinished(files, path)] or found
    layouts = formats.in_order([_outline(files, path) for path in finished])
    torn = [one.path for one in layouts if one.step is None and any(not each.is_blind for each in one.problems)]
    return [*_newest(files, layouts), *(torn if layouts[-1].step is not None else [])]


def _newest(files: Files, layouts: Sequence[Checkpoint]) -> Sequence[str]:
    newest = [one for one in layouts if one.step == layouts[-1].step]
    known = [one.path for one in newest if one.format != formats.UNKNOWN] or [one.path for one in newest]
    if len(known) == 1 or (files.is_dir(known[-1]) and newest[-1].step is not None):
        return known[-1:]
    # Several of one step: each is a checkpoint of its own, or they are the parts of one of unknown layout.
    alone = all(formats.format.stands_alone(formats.read(files, path)) for path in known)
    return known[-1:] if alone else [posixpath.commonpath(known)]


def _outline(files: Files, path: str) -> Checkpoint:
    step = formats.folders.number_in(path.rpartition("/")[2])
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
    if None not in (inside, layout.step) and abs((inside or 0) - (layout.step or 0)) > 1:  # some count from 0
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
