"""Resumes that stand for others. If a state gives the same answers to all that a resume asked of the checkpoint folder,
the job does the same from that state. So it is not resumed again: the events and files of the resume are put on the
state, and judged with its own death. For the same resume, another death can mean another verdict: the same start from
scratch is right before the first checkpoint, and lost work after it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.agent.manifest import FOLDER as MANIFESTS
from torchaos.harness.exploring import past
from torchaos.harness.exploring.looks import Looks
from torchaos.harness.exploring.outcomes import Class, Outcome
from torchaos.harness.exploring.states.state import State
from torchaos.harness.exploring.stats import stats_of
from torchaos.harness.exploring.trials import Trials, checkpoints_in
from torchaos.harness.machine.disk import write_atomically
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir

_MOST_BYTES = 2 << 30  # of new checkpoints that are kept, of all resumes
_STANDS = (Class.RIGHT, Class.LOST_WORK, Class.WRONG)


@dataclass(frozen=True)
class Resumed:
    """One resume that may stand for others."""

    state: State
    looks: Looks
    cold: bool
    until: int  # the highest step at a death after which this resume went on for long enough
    staged_s: tuple[float, float]  # when its state was put on disk: CLOCK_MONOTONIC, and seconds since the epoch
    folder: Path  # what it left: `files` (of the checkpoint folder), and folders of the run directory
    gone: tuple[str, ...]  # paths that it removed from the checkpoint folder


class Standing:
    """The resumes that may stand for others, of one exploration."""

    def __init__(self, trials: Trials, home: Path) -> None:
        self._trials, self._home = trials, home
        self._known: list[Resumed] = []
        self._bytes = 0
        self._inventories: dict[Hashable, str] = {}  # of the checkpoints that are there after a resume
        shutil.rmtree(home, ignore_errors=True)

    def learn(self, state: State, looks: Looks, found: Outcome, ended: bool) -> None:
        """Keeps the resume whose files are in the folder of resumes. `ended`: the job went on to its last step."""
        if found.kind not in _STANDS or found.from_step is None or self._bytes > _MOST_BYTES:
            return
        trials, folder = self._trials, self._home / str(len(self._known))
        root = checkpoints_in(trials.plan, trials.now)
        was, now = trials.staged, stats_of(root)
        for path in (path for path in now if now[path] != was.get(path)):
            self._bytes += _put(root / path, folder / "files" / path)
        for name, left_out in _parts(trials.now):
            for own in _files(trials.now.root / name):
                if own.name not in (left_out, *trials.manifests):
                    _put(own, folder / name / own.name)
        gone = tuple(path for path in was if path not in now)
        until = 1 << 60 if ended else found.died_at_step
        self._known.append(Resumed(state, looks, not found.warm, until, trials.staged_s, folder, gone))

    def of(self, state: State) -> tuple[Outcome, Record] | None:
        """The outcome of the state and the record behind it, by a resume from a state that looks the same to the job.
        None if there is no such resume, or none that went on for long enough. `warm` says how that one was started."""
        died_at = self._trials.died_at(state)
        same = [one for one in self._known if died_at <= one.until and one.looks.same(one.state.tree, state.tree)]
        one = max(same, key=lambda each: each.cold, default=None)
        return None if one is None else self._put_on(state, one)

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def _put_on(self, state: State, one: Resumed) -> tuple[Outcome, Record]:
        trials = self._trials
        trials.stage(state, one.staged_s[0])
        root = checkpoints_in(trials.plan, trials.now)
        for own in map(root.joinpath, trials.staged):  # unchanged files must not look newer than the resume
            if own.is_file() and not own.is_symlink() and own.stat().st_nlink == 1:
                os.utime(own, (one.staged_s[1], one.staged_s[1]))
        for gone in sorted(one.gone, reverse=True):
            _remove(root / gone)
        files = one.folder / "files"
        own_files = sorted(files.rglob("*")) if files.is_dir() else []
        for path in own_files:
            to = root / path.relative_to(files)
            if path.is_dir() and not path.is_symlink():
                to.mkdir(parents=True, exist_ok=True)
            else:
                _remove(to)
                _put(path, to)
        for name, _left_out in _parts(trials.now):
            for path in _files(one.folder / name):
                _put(path, trials.now.root / name / path.name)
        self._take_inventory(state, one, {path.relative_to(files).as_posix() for path in own_files})
        found, record = trials.judge(state, False, 0.0, warm=not one.cold)
        return replace(found, like=one.state.name), record

    def _take_inventory(self, state: State, one: Resumed, put: Collection[str]) -> None:
        """Reads the checkpoints that are in the folder now. If the same resume has left the same files on another
        state, they were read before. `put`: the paths of the files and folders of the resume."""
        trials, tree = self._trials, state.tree
        root, inventory = checkpoints_in(trials.plan, trials.now), trials.now.artifacts / "inventory.json"
        kept = {
            path: tree.files[path].digest if path in tree.files else tree.links.get(path, "")
            for path in trials.staged if path not in put and os.path.lexists(root / path)
        }  # fmt: skip
        manifests = {path.name for path in _files(trials.now.agent_plan.parent / MANIFESTS)}
        key = one.folder, frozenset(kept.items()), frozenset(manifests)
        if key in self._inventories:
            write_atomically(inventory, self._inventories[key], private=True)
            return
        trials.take_inventory()
        text = inventory.read_text() if inventory.exists() else ""
        if text and not json.loads(text)["problem"]:  # it was read to its end
            self._inventories[key] = text


def _parts(run: RunDir) -> list[tuple[str, str]]:
    """The folders of the run directory in which a resume leaves something, each with a name that is left out."""
    manifests = run.agent_plan.parent / MANIFESTS
    folders = ((run.events, past.FILE), (run.logs, ""), (run.artifacts, "inventory.json"), (manifests, ""))
    return [(str(folder.relative_to(run.root)), left_out) for folder, left_out in folders]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _put(path: Path, to: Path) -> int:
    """Gives the file a second name, or makes the folder or link again. Returns the bytes that a new file keeps on
    disk."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        to.symlink_to(os.readlink(path))
    elif path.is_dir():
        to.mkdir(exist_ok=True)
    else:
        os.link(path, to)
        return 512 * path.stat().st_blocks
    return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
