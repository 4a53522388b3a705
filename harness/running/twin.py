"""Makes twins, and keeps them in a cache. A twin is a run without faults with which a run with faults is compared.

A twin is an ordinary run of the same plan, but without faults. Its key in the cache is a digest of everything that
could change the twin and is known before it runs (twin_key.py). A twin is used only while the files that its job read
are unchanged. The cache keeps the data for a verdict, but not the checkpoints.

All twins of a key belong to one generation, which twin 0 begins. When twin 0 becomes stale, all twins of the key are
removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from torchaos.harness.analysis.ending import died_by_itself, timed_out
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Kind, Phase
from torchaos.harness.record.plan import Plan, PlannedFault, counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.reaper_client import UndoError, undo_from_log
from torchaos.harness.running.twin_key import Inputs, difference, key_in, key_of, parts_of, sources_changed

MOST_TWINS, MOST_BYTES = 200, 10 << 30  # limits of the cache
_TRIES = 4
_LOOK_S = 0.2  # seconds between tries to get the lock, which another run holds while it makes the twin
_KEPT = ("plan.json", "events", "artifacts", "logs")
_MADE = "made.json"  # when the twin was made, and the files that its job read
_PARTS = "parts.json"  # beside the twins of a key: the facts of which the key is a digest


class Twins:
    """The twins of one plan, from the cache or newly made. `execute`: the function that runs a plan in a run
    directory."""

    def __init__(
        self, plan: Plan, execute: Callable[[Plan, RunDir], None], cache: Path | None = None,
        given_up: Callable[[], bool] = lambda: False, tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """`given_up`: returns whether the user ended the run; it is called while another run makes the twin. `tell`:
        receives the reason if twins in the cache are made again."""
        self._plan = fault_free(plan)
        self._execute, self._given_up, self._tell = execute, given_up, tell
        self._cache = cache or user_cache_path("torchaos")
        self._first: Inputs | None = None  # the inputs of twin 0, in the generation that this run uses
        self.died = ""  # a clause about the twin's job, if it died by itself or ran into its time-out
        self.failed: Record | None = None  # the twin's record, if its job failed or was ended early
        self.refused = ""  # why no further twin of this generation is available

    @cached_property
    def _home(self) -> Path:
        return self._cache / "twins" / key_in(self._parts)

    @cached_property
    def _parts(self) -> dict[str, Any]:
        return parts_of(self._plan)

    def give(self, number: int, to: RunDir) -> bool:
        """Copies the record of the twin `number` (from 0) into the run directory `to`; makes the twin first if it is
        not in the cache. Returns False in two cases: the twin's job failed or was ended early; or the twins in the
        cache have become stale, or were replaced since twin 0 was copied (then `refused` says why). Raises ChaosError
        if the cache can't be written."""
        try:
            with self._locked() as mine:
                kept = self._home / str(number)
                if not mine or not self._is_current(number):
                    return False
                if not kept.is_dir() and number == 0 and (why := self._why_another()):
                    self._tell(f"the twin is made again: {why}")
                if not (kept.is_dir() or self._make(number, kept)):
                    return False
                self._first = self._first if number else made_of(kept)
                os.utime(self._home)  # marks it as just used: the least recently used twins are removed first
                shutil.copytree(kept, to.twins / str(number), copy_function=_link_or_copy)
        except OSError as error:
            raise ChaosError(
                f"{self._home}: the twin can't be kept: {error}; write twin: none to go without"
            ) from error
        return True

    def has(self, number: int) -> bool:
        return (self._home / str(number)).is_dir()

    def renew(self, why: str) -> bool:
        """Removes the present generation of twins, unless another run has done that already. `why`: the reason, for the
        note to the user. Returns False if the user gave up waiting for another run."""
        with self._locked() as mine:
            if mine and made_of(self._home / "0") == self._first:
                self._forget(why)
            return mine

    def _is_current(self, number: int) -> bool:
        """Whether the twin may be used. For twin 0 the answer is always yes, because a stale generation is removed. For
        a later twin, `refused` has the reason against it."""
        first = made_of(self._home / "0")
        why = first.changed() if first else "the files that its job read are not known" if self.has(0) else ""
        if number == 0:
            if why:
                self._forget(why)
            return True
        self.refused = why or ("" if first == self._first else "twin 0 was made again meanwhile, for another run")
        return not self.refused

    def _why_another(self) -> str:
        """Why the key has changed since the newest twins of this job were made. Empty if there are no such twins, or if
        the reason is not known."""
        homes = (home for home in self._home.parent.iterdir() if home != self._home and (home / "0").is_dir())
        for home in sorted(homes, key=lambda home: home.stat().st_mtime, reverse=True):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                if why := difference(self._parts, json.loads((home / _PARTS).read_text())):
                    return why
        return ""

    def _forget(self, why: str) -> None:
        self._tell(f"the twin is made again: {why}")
        for kept in self._home.glob("[0-9]*"):
            shutil.rmtree(kept)

    def _make(self, number: int, kept: Path) -> bool:
        """Makes a twin and puts it into the cache. Returns False if its job failed or was stopped.

        A healthy job may abort at interpreter exit, and torchrun then restarts it (analysis/ending.py). Such a
        run is no twin, and is made again. A failed twin is kept in the folder `failed`, so that its log can be read."""
        self._clear()
        for _ in range(_TRIES):
            folder = RunDir(self._home / f"run-{number}-{os.getpid()}")
            folder.create()
            began_s = time.time()
            self._execute(self._plan, folder)
            record = Record.load(folder)
            if finished_well(record):
                break
            shutil.rmtree(self._home / "failed", ignore_errors=True)
            folder.root.rename(self._home / "failed")
            record = Record.load(RunDir(self._home / "failed"))  # it reads its steps from there when they are asked for
            if record.exit_code != 0 or record.stopped:
                self.failed, died = record, died_by_itself(record) or _unfinished(record)
                self.died = f"{died}; its files are in {self._home / 'failed'}" if died else ""
                return False
        else:
            return False
        partial = self._home / f".{number}-{os.getpid()}"
        partial.mkdir(mode=0o700)
        for name in _KEPT:
            (folder.root / name).rename(partial / name)
        (partial / _MADE).write_text(Inputs.of(folder, began_s).to_json())
        write_atomically(self._home / _PARTS, json.dumps(self._parts), private=True)
        partial.rename(kept)
        shutil.rmtree(folder.root)
        forget_old(self._home)
        return True

    def _clear(self) -> None:
        """Removes what killed harnesses left here while they made a twin. This process holds the lock, so all those
        harnesses are dead, even if a name contains the pid of this process: pids in different containers may be
        equal."""
        for left in (*self._home.glob("run-*"), *self._home.glob(".[0-9]*-*")):
            with suppress(UndoError):  # a reaper is still undoing its changes
                if all(result.verified for result in undo_from_log(left)):
                    shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Holds the lock of this key. If two runs want the same twin at the same time, the second one waits, and then
        finds the twin in the cache. Yields False if the user gave up waiting."""
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._home / "lock", "w") as lock:
            while not (mine := _lock(lock.fileno())) and not self._given_up():
                time.sleep(_LOOK_S)
            yield mine


def forget_old(newest: Path) -> None:
    """Keeps the cache within its limits. Removes the least recently used twins, except `newest` and those that a run
    has locked. `newest`: the folder of a key in the cache."""
    homes = sorted((path for path in newest.parent.iterdir() if path != newest), key=lambda path: path.stat().st_mtime)
    sizes = {path: _size(path) for path in (*homes, newest)}
    for home in homes:
        if len(sizes) <= MOST_TWINS and sum(sizes.values()) <= MOST_BYTES:
            return
        with suppress(OSError), open(home / "lock", "w") as lock:
            if _lock(lock.fileno()):
                shutil.rmtree(home, ignore_errors=True)
                del sizes[home]


def _size(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found += path.lstat().st_blocks * 512
    return found


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fault_free(plan: Plan) -> Plan:
    """The plan of the twin: without faults, conditions and assertions. Its agents also record which files the job
    reads.

    The agents do not hook collectives if only a fault needs that hook: without stamps, the hook records nothing. So a
    run with such a fault can use the twin of other runs."""
    only_for_faults = set() if "stamps" in plan.hooks else {"collectives"}
    hooks = tuple(sorted({*plan.hooks, "reads"} - only_for_faults))
    return replace(plan, faults=(), stop=(), steady_state=(), asserts=(), twin={}, hooks=hooks)


def kept_twin_of(plan: Plan, cache: Path | None = None) -> Record | None:
    """A usable twin of the job in the cache: the twin with this plan's key or, if there is none, a twin that was made
    for other assertions. None if there is neither."""
    twins = (cache or user_cache_path("torchaos")) / "twins"
    exact = twins / key_of(fault_free(plan)) / "0"
    kept = exact if exact.is_dir() else next((one for one in twins.glob("*/0") if _is_of(plan, one)), exact)
    made = made_of(kept)
    try:
        return None if made is None or made.changed() else Record.load(RunDir(kept))
    except (ChaosError, OSError, ValueError):  # the twin is being removed or is damaged: the run makes another
        return None


def _is_of(plan: Plan, twin: Path) -> bool:
    """Whether a twin is of the same job as the plan, started in the same way."""
    try:
        theirs = json.loads((twin / "plan.json").read_text())
    except (OSError, ValueError):
        return False
    mine = json.loads(plan.to_json())
    same = all(
        mine["job"][name] == theirs["job"].get(name) for name in ("command", "cwd", "env", "world_size", "nodes")
    )
    made = made_of(twin)
    same = same and mine["launcher"] == theirs["launcher"]
    return same and made is not None and not sources_changed(plan, made.made_s)


def last_step_in(twin: Record) -> int | None:
    """The last global step of a twin. None if none of its steps was seen."""
    steps = [replica.history.last_step for replica in twin.of_replicas]
    return max((step for step in steps if step is not None), default=None)


def too_late(plan: Plan, last: int, why: str = "as its twin did") -> dict[int, str]:
    """The faults in steps that the job does not reach: by index in the plan, a clause about each. A fault in the step
    after the last one is not too late: it comes at the end of the job, for example in its last save. `why`: how the
    last step is known."""
    steps = {n: fault.trigger.step for n, fault in enumerate(plan.faults) if isinstance(fault.trigger, Moment)}
    end = f"and the job ends at step {last}, {why}"
    return {
        number: f"{plan.faults[number].id} comes in step {step}, {end}; write an earlier step"
        for number, step in steps.items()
        if step is not None and step > last + 1
    }


def unreached(plan: Plan, twin: Record) -> dict[int, str]:
    """The faults whose moment the job does not reach, as its twin shows: by index in the plan, a clause about each. If
    a fault can come after another one, only its step is judged: a later attempt may do what the first one does not."""
    last = last_step_in(twin)
    found = {} if last is None else too_late(plan, last)
    for number, fault in enumerate(plan.faults):
        if number not in found and len(plan.faults) == 1 and (why := _never_comes(fault, plan, twin)):
            found[number] = f"{fault.id} {why}"
    return found


def check_reached(plan: Plan, twin: Record, places: Sequence[str]) -> None:
    """Raises UsageError if no fault of the plan would come, as the twin shows: the run would be just another twin.
    `places`: for each fault, the place of its moment, for the message."""
    found = unreached(plan, twin)
    if found and len(found) == len(plan.faults):
        raise UsageError("\n".join(f"{places[number]}: {text}" for number, text in found.items()))


def _never_comes(fault: PlannedFault, plan: Plan, twin: Record) -> str:
    """Why the moment of the only fault does not come, as a clause. Empty if it may come."""
    when = fault.trigger
    if isinstance(when, Moment) and when.attempt:
        told = f"comes in attempt {when.attempt}, and the job makes only attempt 0, as its twin did"
        return f"{told}; add a fault that restarts it, or write attempt: 0"
    saved = Kind.SAVE_BEGIN in {event.kind for event in twin.beside_steps}
    if "checkpoints" not in twin.plan.hooks:
        return ""  # nobody looked
    if not isinstance(when, Moment):
        told = f"comes after {when.checkpoints} checkpoints" if when.checkpoints > 1 else "comes after a checkpoint"
        return "" if saved or not when.checkpoints else f"{told}, and the job saves none, as its twin did not"
    if when.phase not in (Phase.CHECKPOINT_WRITE, Phase.CHECKPOINT_WRITTEN) or saved:
        return ""
    return "comes in the save of a checkpoint, and the job saves none, as its twin did not; choose another phase"


def made_of(twin: Path) -> Inputs | None:
    """When a twin was made, and the files that its job read. None if this was not recorded, or is damaged."""
    try:
        return Inputs.from_json((twin / _MADE).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finished_well(twin: Record) -> bool:
    """Whether the twin's job succeeded in its first attempt. A job that was ended early does not count, because it may
    save and end with exit code 0."""
    return twin.exit_code == 0 and len(twin.history.attempts) == 1 and not twin.stopped


def _unfinished(twin: Record) -> str:
    """A clause about a twin that ran into its time-out. Empty for any other."""
    if not timed_out(twin):
        return ""
    done = counted(last_step_in(twin) or 0, "step", "was/were")
    return f"its time-out of {twin.plan.job.timeout_s:g} s was over when {done} done; write a longer job.timeout"


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
