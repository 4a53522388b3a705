"""The ways to resume the job from a state, the cheapest first:

    ReusedResumes   a resume from another state, if the job sees no difference
    WarmResumes     forked ranks. A failure of theirs is only suspected, until a start without a fork shows it:
    WarmResumes     new interpreters, if the launcher has shown the same failure before, and as long as they show it
    LauncherResume  the job's own launcher

A resume asks questions of the checkpoint folder: which files are there, and what is in them. If another state gives the
same answers to all of them, the events and files of that resume are used for the other state too. They are judged with
the other state's own death, because the verdict depends on it: a start from scratch is right before the first
checkpoint, and lost work after it. If the job failed from one state before its first step, it fails in the same way
from each state that gives the same answers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.fuse_mount import ReadSet, ReadTracers
from torchaos.harness.crash_explorer.recording_log import stats_of
from torchaos.harness.crash_explorer.resume_outcomes import (
    Outcome,
    OutcomeClass,
    failed_at_once,
    failure,
    is_suspected,
    with_proof,
)
from torchaos.harness.crash_explorer.resume_runs import Resume, ResumeRuns, checkpoints_in
from torchaos.harness.crash_explorer.resumers import LauncherResume, ResumeTrace, WarmResumes, difference
from torchaos.harness.host.disk import owner_only, write_atomically
from torchaos.harness.protocol.wire import MANIFESTS
from torchaos.harness.record.rundir import RunDir


class ResumeChain:
    """Resumes the job from one state after the other. `stop` and `hurry` may be called from a signal handler."""

    def __init__(
        self, runs: ResumeRuns, launcher: LauncherResume, forks: WarmResumes | None, home: Path,
        states: Sequence[State], done: Mapping[tuple[str, str], Outcome],
    ) -> None:  # fmt: skip
        """`done`: the outcomes so far; the caller adds to them. `forks`: None: ranks are not forked."""
        self._runs, self._launcher, self._forks, self._done = runs, launcher, forks, done
        self._reused = ReusedResumes(runs, home, states)
        self._stopped = False
        self.notes: list[str] = []  # failures that only forked ranks had, one sentence each

    @property
    def doubt(self) -> str:
        """Why no resume may be used for other states, as a sentence. Empty if resumes may be."""
        return self._reused.doubt

    @property
    def in_words(self) -> str:
        """The method by which most states were resumed, as text."""
        return self._forks.in_words if self._forks else "by the job's own launcher"

    @property
    def left(self) -> list[str]:
        return [*self._launcher.left, *self._runs.left]

    def stop(self, reason: str) -> None:
        self._stopped = True
        self._launcher.stop(reason)
        if self._forks:
            self._forks.stop()

    def hurry(self, reason: str) -> None:
        self.stop(reason)
        self._launcher.hurry(reason)

    def close(self) -> None:
        if self._forks:
            self._forks.close()
        self._reused.close()
        self._runs.close()

    def without_start(self, state: State) -> Outcome | None:
        """The outcome without a start of the job. None if ranks can't be forked."""
        found = self._reused_outcome(state)
        made = self._forks(state, self._reused.tracers) if self._forks and not found else None
        if made and not self._stopped:
            self._reused.learn(state, made)
        found = made.outcome if made else found
        return found and with_proof(found, self._done.values())

    def confirm(self, state: State, suspected: Outcome) -> Outcome | None:
        """The outcome of a state from which forked ranks have failed: from starts of other states since then, or else
        from a start of the job."""
        found = with_proof(suspected, self._done.values())
        if is_suspected(found):
            found = self._reused_outcome(state) or suspected
        return self.by_start(state, suspected) if is_suspected(found) else found

    def by_start(self, state: State, suspected: Outcome | None = None) -> Outcome | None:
        """The outcome of a start of the job. `suspected`: the failure of forked ranks, which is returned if the chain
        is stopped before the start has an outcome."""
        again = suspected is None or suspected.mended is not False
        made = self._by_interpreters(state, again, suspected) if suspected else None
        if not made and not self._stopped:
            made = self._launcher(state, again, self._reused.every)
        if not made or self._stopped:
            return suspected
        found = made.outcome
        self._learn(state, made, suspected)
        if suspected is None:
            return found
        if suspected.kind is found.kind:
            mended = suspected.mended if found.mended is None else found.mended
            same = failure(suspected) == failure(found)
            return replace(found, mended=mended, printed=suspected.printed if same else "")
        self.notes.append(
            f"{state.name}: forked ranks gave '{suspected.kind.value}' ({suspected.reason}), and a cold start "
            f"'{found.kind.value}', which counts"
        )
        return found

    def _learn(self, state: State, made: Resume, suspected: Outcome | None) -> None:
        """Keeps a start of the job whose result may hold for other states."""
        same = suspected is None or failure(suspected) == failure(made.outcome)
        if not made.reads:
            return
        if not failed_at_once(made.record):
            if same:
                self._reused.learn(state, made)
        elif made.outcome.mended is False if suspected is None else same:
            self._reused.learn_failure(state, made.reads)  # a failure that was seen once may be chance

    def _reused_outcome(self, state: State) -> Outcome | None:
        return self._reused.of(state, self._done, self._forks)

    def _by_interpreters(self, state: State, again: bool, suspected: Outcome) -> Resume | None:
        """A resume by new interpreters. None if their result must not count."""
        known = any(not one.warm and failure(one) == failure(suspected) for one in self._done.values())
        made = self._forks.new_interpreters(state, again, self._reused.every) if known and self._forks else None
        return made if made and failure(made.outcome) == failure(suspected) else None


_MOST_BYTES = 2 << 30  # bytes of new checkpoints that are kept, of all resumes together
_STANDS = (OutcomeClass.RIGHT, OutcomeClass.LOST_WORK, OutcomeClass.WRONG)


@dataclass(frozen=True)
class CachedResume:
    """One resume whose result may hold for other states."""

    state: State
    questions: ReadSet
    cold: bool
    until: int  # the highest step of a death for which this resume went on for long enough
    staged_s: tuple[float, float]  # when its state was put on disk: CLOCK_MONOTONIC, and seconds since the epoch
    folder: Path  # what it left: `files` (of the checkpoint folder), and folders of the run directory
    gone: tuple[str, ...]  # paths that it removed from the checkpoint folder


class ResumeCache:
    """The resumes of one exploration whose results may hold for other states."""

    def __init__(self, runs: ResumeRuns, home: Path) -> None:
        self._runs, self._home = runs, home
        self._known: list[CachedResume] = []
        self._bytes = 0
        self._inventories: dict[Hashable, str] = {}  # the inventories after a resume, by what is there
        shutil.rmtree(home, ignore_errors=True)

    def learn(self, state: State, questions: ReadSet, found: Outcome, ended: bool) -> None:
        """Keeps the resume whose files are in the folder of resumes. `ended`: whether the job went on to its last
        step."""
        if found.kind not in _STANDS or found.from_step is None or self._bytes > _MOST_BYTES:
            return
        runs, folder = self._runs, self._home / str(len(self._known))
        root = checkpoints_in(runs.plan, runs.now)
        was, now = runs.staged, stats_of(root)
        for path in (path for path in now if now[path] != was.get(path)):
            self._bytes += _put(root / path, folder / "files" / path)
        for name, left_out in _parts(runs.now):
            for own in _files(runs.now.root / name):
                if own.name not in (left_out, *runs.manifests):
                    _put(own, folder / name / own.name)
        gone = tuple(path for path in was if path not in now)
        until = 1 << 60 if ended else found.died_at_step
        self._known.append(CachedResume(state, questions, not found.warm, until, runs.staged_s, folder, gone))

    def of(self, state: State) -> Resume | None:
        """A resume of this state, made from the resume of a state that looks the same to the job. None if there is none
        that went on for long enough. `warm` of the outcome says how that other resume was started."""
        died_at = self._runs.died_at(state)
        same = [one for one in self._known if died_at <= one.until and one.questions.same(one.state.tree, state.tree)]
        one = max(same, key=lambda each: each.cold, default=None)
        return None if one is None else self._put_on(state, one)

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def _put_on(self, state: State, one: CachedResume) -> Resume:
        runs = self._runs
        runs.stage(state, one.staged_s[0])
        root = checkpoints_in(runs.plan, runs.now)
        for own in map(root.joinpath, runs.staged):  # unchanged files must not look newer than the resume
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
        for name, _left_out in _parts(runs.now):
            for path in _files(one.folder / name):
                _put(path, runs.now.root / name / path.name)
        self._take_inventory(state, one, {path.relative_to(files).as_posix() for path in own_files})
        made = runs.judge(state, False, 0.0, warm=not one.cold)
        return replace(made, outcome=replace(made.outcome, like=one.state.name))

    def _take_inventory(self, state: State, one: CachedResume, put: Collection[str]) -> None:
        """Takes the inventory of the checkpoints that are in the folder now. Not read again if the same resume has left
        the same files on another state. `put`: the paths of the files and folders of the resume."""
        runs, tree = self._runs, state.tree
        root, inventory = checkpoints_in(runs.plan, runs.now), runs.now.artifacts / "inventory.json"
        kept = {
            path: tree.files[path].digest if path in tree.files else tree.links.get(path, "")
            for path in runs.staged if path not in put and os.path.lexists(root / path)
        }  # fmt: skip
        manifests = {path.name for path in _files(runs.now.agent_plan.parent / MANIFESTS)}
        key = one.folder, frozenset(kept.items()), frozenset(manifests)
        if key in self._inventories:
            write_atomically(inventory, self._inventories[key], private=True)
            return
        runs.take_inventory()
        text = inventory.read_text() if inventory.exists() else ""
        if text and not json.loads(text)["problem"]:  # only if it was read to its end
            self._inventories[key] = text


def _parts(run: RunDir) -> list[tuple[str, str]]:
    """The folders of the run directory into which a resume writes, each with the file in it that is not copied ("":
    none)."""
    manifests = run.agent_plan.parent / MANIFESTS
    folders = ((run.events, synthetic_crash.FILE), (run.logs, ""), (run.artifacts, "inventory.json"), (manifests, ""))
    return [(str(folder.relative_to(run.root)), left_out) for folder, left_out in folders]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _put(path: Path, to: Path) -> int:
    """Gives the file a second name (a hard link), or makes the folder or link again. Returns the bytes that this keeps
    on disk."""
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


class FailureCache:
    """The failures that may hold for other states. The file `looks.jsonl` keeps them for an exploration that is
    continued."""

    def __init__(self, home: Path, states: Sequence[State]) -> None:
        self._path = home / "looks.jsonl"
        by_key = {(state.digest, state.model): state for state in states}
        self._known: list[tuple[State, ReadSet]] = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            digest, model, asked = json.loads(line)
            if state := by_key.get((digest, model)):
                self._known.append((state, ReadSet.from_json(asked)))

    def learn(self, state: State, questions: ReadSet) -> None:
        """`questions`: what the job asked before it failed from this state."""
        self._known.append((state, questions))
        with open(self._path, "ab", opener=owner_only) as file:
            file.write(json.dumps([state.digest, state.model, questions.to_json()]).encode() + b"\n")

    def of(
        self, state: State, died_at: Callable[[State], int], done: Mapping[tuple[str, str], Outcome]
    ) -> Outcome | None:  # fmt: skip
        """The outcome of this state, from the failure of a state that looks the same to the job. None if there is
        none."""
        for other, questions in self._known:
            found = done.get((other.digest, other.model))
            if found and questions.same(other.tree, state.tree):
                return replace(
                    found, state=state.name, digest=state.digest, model=state.model, died_at_step=died_at(state),
                    mended=None, seconds=0.0, operations=state.operations, moments=state.moments, files=(), run_dir="",
                    last_operation=str(state.last_operation or ""), like=other.name,
                )  # fmt: skip
        return None


LIKE = (
    "all that the job asks of the checkpoint folder is the same as in a state from which it was resumed; each was "
    "judged with its own death"
)
_FIRST = 3  # the number of resumes whose questions are always noted; after these, only if noting has saved resumes


class ReusedResumes:
    """Knows which states have been resumed, and for which other states the result of each holds."""

    def __init__(self, runs: ResumeRuns, home: Path, states: Sequence[State]) -> None:
        self._runs = runs
        self.every = ReadTracers(home / "looking")  # for a resume whose questions are always noted
        self._failures = FailureCache(home, states)
        self._resumes: ResumeCache | None = ResumeCache(runs, home / "standing")
        self._kept = self._skipped = 0  # resumes that may stand for others; states that needed no resume
        self.doubt = ""  # why resumes that trained stand for no others, as a sentence

    @property
    def tracers(self) -> ReadTracers | None:
        """The tracers that note the questions of the next resume. None if the notes, which take time, have saved no
        resumes so far."""
        return self.every if self._resumes and self._kept <= _FIRST + self._skipped else None

    def learn(self, state: State, made: Resume) -> None:
        """Keeps a resume that trained, if its questions are known. Its files must still be in the folder of resumes."""
        if made.reads is None:
            return
        self._kept += 1
        if self._resumes:
            ended = made.record.exit_code == 0 and not made.record.stopped
            self._resumes.learn(state, made.reads, made.outcome, ended)

    def learn_failure(self, state: State, questions: ReadSet) -> None:
        """Keeps what the job asked before it failed. It must have failed twice from this state."""
        self._failures.learn(state, questions)

    def of(
        self, state: State, done: Mapping[tuple[str, str], Outcome], resume: Callable[[State], Resume | None] | None
    ) -> Outcome | None:
        """The outcome of this state by a resume from another state; None if there is none. The first such outcome is
        checked by `resume`. If the check gives another outcome, resumes that trained are no longer used for other
        states."""
        found = self._failures.of(state, self._runs.died_at, done)
        if found or self._resumes is None:
            return found
        stood = self._resumes.of(state)
        if stood and resume and not self._skipped:
            shown = ResumeTrace.of(stood.record)
            real = resume(state)
            if real is None:
                return None
            self.doubt = _doubt(stood.outcome, shown, real.outcome, ResumeTrace.of(real.record))
            if self.doubt:
                self._resumes.close()
                self._resumes = None
                return real.outcome
        self._skipped += stood is not None
        return stood.outcome if stood else None

    def close(self) -> None:
        self.every.close()
        if self._resumes:
            self._resumes.close()


def _doubt(found: Outcome, shown: ResumeTrace, real: Outcome, really: ResumeTrace) -> str:
    same = real.kind is found.kind
    why = difference(shown, really) or ("" if same else f"it gives '{real.kind.value}', not '{found.kind.value}'")
    return why and (
        f"no resume stands for other states: {found.state} looks the same to the job as {found.like}, and was resumed "
        f"to check that: {why}"
    )
