"""Saves and loads of checkpoints by torch, safetensors, Lightning and torch.distributed.checkpoint, also in processes
that the rank forks.

The event of a load has the numbers in the checkpoint that show how far training was. From these, the harness finds the
step at which a resumed job starts."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

from ...protocol.wire import Kind, Phase
from ..agent import Agent
from ..state.state_check_sums import StateSums
from .manifest_hooks import ManifestHook
from .saved_files import BufferSaves, RenameHook, absolute


class Children:
    """Reports the saves that a forked child of the rank makes. `fields`: added to the events of a save; in a child, its
    pid."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._watched: int | None = None  # the child whose end is reported
        self._tell = agent.careful("checkpoints")(self._ended)

    @property
    def fields(self) -> dict[str, Any]:
        return {} if self._agent.child is None else {"child": self._agent.child}

    def saves(self) -> None:
        """Must be called when a save begins. A forked child reports the end of its saves when it ends, so its first
        save wraps os._exit, with which such children (also those of multiprocessing) end."""
        child, leave = self._agent.child, os._exit
        if child is None or child == self._watched:
            return
        self._watched = child

        def _exit(status: int) -> NoReturn:
            if status == 0 and self._agent.child == child:
                self._tell(child)
            leave(status)

        os._exit = _exit

    def _ended(self, child: int) -> None:
        self._agent.emit(Kind.WRITER_ENDED, {"child": child})


_NAMES = frozenset(
    {
        *("step", "steps", "global_step", "global_steps", "current_step", "train_step", "num_steps", "n_steps"),
        *("step_count", "_step_count", "iteration", "iterations", "iter", "iters", "iter_num", "num_iterations"),
        *("epoch", "epochs", "current_epoch", "last_epoch", "batch_idx", "num_updates"),
        *("samples_seen", "consumed_samples", "consumed_train_samples"),
    }
)
_DEPTH, _ENTRIES, _LIMIT_S, _FOUND = 5, 4000, 0.005, 64


def step_numbers(contents: Any) -> dict[str, int]:
    """Integers whose names look like step counts, by their path in nested mappings and lists, such as
    `optimizer.state.0.step`. In a mapping with integer keys (an optimizer's state), only the first entry is searched.
    Stops at _DEPTH levels, or after 5 ms of processor time."""
    found: dict[str, int] = {}
    end_s = time.thread_time() + _LIMIT_S  # on a busy machine, the thread may wait for a processor
    level = [("", contents)]
    looked = 0
    for _ in range(_DEPTH):
        deeper = []
        for path, value in level:
            for name, entry in _entries(value):
                looked += 1
                if looked > _ENTRIES or len(found) >= _FOUND or time.thread_time() > end_s:
                    return found
                number = _number(entry) if name in _NAMES else None
                if number is not None:
                    found[path + name] = number
                elif isinstance(entry, (dict, list, tuple, Mapping)):
                    deeper.append((f"{path}{name}.", entry))
        level = deeper
    return found


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        all_alike = len(value) > 1 and all(isinstance(name, int) for name in list(value)[:8])
        entries = list(value.items())[: 1 if all_alike else _ENTRIES]  # an optimizer's state
        return ((str(name), entry) for name, entry in entries)
    if isinstance(value, (list, tuple)):
        return ((str(place), entry) for place, entry in enumerate(value[:8]))
    return iter(())


def _number(entry: Any) -> int | None:
    if isinstance(entry, bool) or (hasattr(entry, "numel") and (entry.device.type != "cpu" or entry.numel() != 1)):
        return None
    if isinstance(entry, (int, float)) or hasattr(entry, "numel"):
        value = float(entry)
        return int(value) if value == int(value) else None
    return None


Digested = Callable[[Callable[..., Any], str, "tuple[Any, ...]", "dict[str, Any]"], Any]


class Transfers:
    """Emits an event when a save or load (a transfer) begins, and another when it ends. A call inside another save or
    load gets no events."""

    def __init__(self, agent: Agent, digesting: ManifestHook, kept: StateSums) -> None:
        self._agent, self.digesting, self._kept = agent, digesting, kept
        self._thread = threading.local()
        self.renames, self.children = RenameHook(agent), Children(agent)
        self.buffers = BufferSaves(agent, self._found)
        self.open: list[str] = []  # paths of saves and loads in progress, in all threads
        os.register_at_fork(after_in_child=self.open.clear)
        careful = agent.careful("checkpoints")
        self.begin, self.end = careful(self._begin), careful(self._end)
        self._numbers, self._path = careful(step_numbers), careful(_path_of)

    def file_saver(
        self, original: Callable[..., Any], place: int, name: str, format: str, digested: Digested,
        elsewhere: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Wraps a function that writes a file. Its path or file object is argument number `place`, or keyword `name`.
        `digested` calls the original for a file that is reported. `elsewhere` calls it for a buffer in memory and for a
        call inside another save."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            path = self._file(args, kwargs, place, name)
            if path is not None:
                with self.saving(path, format):
                    return digested(original, path, args, kwargs)
            if elsewhere is None:
                return original(*args, **kwargs)
            outermost, begun = self._agent.sees_saves and not self.is_nested(""), time.monotonic()
            if outermost and self._agent.changed is not None:
                self._agent.changed(False)
            result = elsewhere(original, args, kwargs)
            if outermost and not self.open:
                waits = threading.get_ident() == self._agent.thread
                target = kwargs.get(name, args[place] if len(args) > place else None)
                self.buffers.saved(target, time.monotonic() - begun if waits else 0.0)
            return result

        return save

    def file_loader(self, original: Callable[..., Any], name: str, format: str) -> Callable[..., Any]:
        """Wraps a function that reads a checkpoint file and returns its contents, so that its calls are reported as
        loads. The file is the first argument, or the keyword `name`."""

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            path = self._file(args, kwargs, 0, name) if self._agent.on else None
            if path is None:
                return original(*args, **kwargs)
            with self.loading(path, format) as transfer:
                transfer.contents = original(*args, **kwargs)
            return transfer.contents

        return load

    def saving(self, path: str, format: str) -> Transfer:
        return Transfer(self, self._agent, path, format, saves=True)

    def loading(self, path: str, format: str) -> Transfer:
        return Transfer(self, self._agent, path, format, saves=False)

    def is_nested(self, path: str) -> bool:
        if getattr(self._thread, "depth", 0):
            return True
        return any(path == other or path.startswith(other + os.sep) for other in self.open)

    def written(self) -> None:
        """Must be called when a save has written everything but has not yet returned to the job. A fault may fire
        here."""
        if self._agent.on and self._agent.faults.expects(Phase.CHECKPOINT_WRITTEN):
            self.digesting.settle()  # the manifest reads the file before a fault can damage it
            self._agent.faults.enter(Phase.CHECKPOINT_WRITTEN)

    def _found(self, path: str, step: int, blocked_s: float) -> None:
        """Reports a save, when a file with the contents of an earlier torch.save to a buffer is found."""
        self._agent.saw("checkpoints")
        self._agent.saves += 1
        self._kept.handled()
        fields = {"path": path, "format": "torch", **self.children.fields}
        self._agent.emit(Kind.SAVE_BEGIN, fields, step)
        self.renames.saved(path)
        self._agent.emit(Kind.SAVE_END, {**fields, "ok": True, "blocked_s": round(blocked_s, 6)}, step)

    def count(self, by: int) -> None:
        self._thread.depth = getattr(self._thread, "depth", 0) + by

    def _file(self, args: Any, kwargs: Any, place: int, name: str) -> str | None:
        """The path to report, or None for a buffer in memory and for a nested call."""
        if not self._agent.sees_saves:
            return None
        target = kwargs.get(name, args[place] if len(args) > place else None)
        path: str | None = self._path(target)
        return None if path is None or self.is_nested(path) else path

    def _begin(self, path: str, format: str, saves: bool) -> None:
        self._agent.saw("checkpoints")
        self.open.append(path)
        fields = {"path": path, "format": format, **self.children.fields}
        self._agent.emit(Kind.SAVE_BEGIN if saves else Kind.LOAD_BEGIN, fields)
        if saves:
            self._agent.saves += 1
            self._kept.save_begins()
            self.children.saves()

    def _end(
        self, path: str, format: str, saves: bool, ok: bool, blocked_s: float, contents: Any, step: int, missing: bool
    ) -> None:
        self.open.remove(path)
        fields = {"path": path, "format": format, "ok": ok, **self.children.fields}
        if saves:
            self.renames.saved(path)
            self._agent.emit(Kind.SAVE_END, {**fields, "blocked_s": round(blocked_s, 6)}, step)
        else:
            fields["numbers"] = (self._numbers(contents) or {}) if ok else {}
            self._agent.emit(Kind.LOAD_END, {**fields, "missing": True} if missing else fields, step)
            if ok:
                self.renames.loaded(path)
                self._agent.loads += 1
                self._kept.handled()
                self._agent.faults.loaded()


class Transfer:
    """One save or load, as a context: emits its events, enters its phase, and lets faults fire in that phase."""

    def __init__(self, transfers: Transfers, agent: Agent, path: str, format: str, saves: bool) -> None:
        self._transfers, self._agent = transfers, agent
        self._path, self._format, self._saves = path, format, saves
        self._phase = Phase.CHECKPOINT_WRITE if saves else Phase.CHECKPOINT_LOAD
        self._in_training = threading.get_ident() == agent.thread
        self.contents: Any = None
        self._later: Callable[[Callable[[bool], None]], None] | None = None

    def ends_later(self, when: Callable[[Callable[[bool], None]], None]) -> None:
        """Must be called for a save that goes on after its call has returned, such as `async_save`. `when` gets a
        function `end`, which must be called at the end of the save, with True if the save succeeded."""
        self._later = when

    def __enter__(self) -> Transfer:
        if self._agent.changed is not None:
            self._agent.changed(not self._saves)
        self._transfers.begin(self._path, self._format, self._saves)
        self._step, self._begun = self._agent.steps_over, time.monotonic()
        if self._in_training:
            try:
                self._agent.enter(self._phase)
            except BaseException:
                self._leave(False)
                raise
        self._transfers.count(+1)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._transfers.count(-1)
        self._leave(error is None, isinstance(error, FileNotFoundError) and not os.path.lexists(self._path))

    def _leave(self, ok: bool, missing: bool = False) -> None:
        blocked = 0.0
        if self._in_training:
            self._agent.phases.leave(self._phase)
            blocked = time.monotonic() - self._begun
        if ok and self._saves and self._later is None:
            self._transfers.written()

        def end(ok: bool) -> None:
            if self._agent.on or self._agent.child is not None:
                contents, self.contents = self.contents, None if self._saves else self.contents
                self._transfers.end(self._path, self._format, self._saves, ok, blocked, contents, self._step, missing)

        if ok and self._later is not None:
            self._later(end)
        else:
            end(ok)


class CheckpointHook:
    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def patch_torch(self, torch: Any) -> None:
        digesting = self._transfers.digesting
        digesting.patch_serialization(torch.serialization)
        save = self._transfers.file_saver(
            torch.save, 1, "f", "torch", digesting.torch_save, digesting.torch_save_in_memory
        )
        load = self._transfers.file_loader(torch.load, "f", "torch")
        for module in (torch, torch.serialization):
            module.save, module.load = save, load

    def patch_safetensors(self, module: Any) -> None:
        """Patches the module safetensors.torch."""
        digested = self._transfers.digesting.safetensors
        module.save_file = self._transfers.file_saver(module.save_file, 1, "filename", "safetensors", digested)
        module.load_file = self._transfers.file_loader(module.load_file, "filename", "safetensors")

    def patch_lightning(self, module: Any) -> None:
        """Patches lightning.fabric.utilities.cloud_io, which saves to memory and then writes the bytes to a file."""
        digested = self._transfers.digesting.atomic_save
        module._atomic_save = self._transfers.file_saver(module._atomic_save, 1, "filepath", "torch", digested)


def _path_of(target: Any) -> str | None:
    """The absolute path of a path or of an open file. None for a buffer in memory."""
    if not isinstance(target, (str, bytes, os.PathLike)):
        target = getattr(target, "name", None) or getattr(target, "full_name", None)  # the latter: of fsspec
    if not isinstance(target, (str, bytes, os.PathLike)):
        return None
    path = os.fsdecode(os.fspath(target))
    return absolute(path) if path else None


class DistributedCheckpointHook:
    """Saves and loads by torch.distributed.checkpoint. `save`, `save_state_dict` and the thread of `async_save` all
    call `_save_state_dict`, and every load calls `_load_state_dict`. These two are wrapped, so it does not matter under
    which name the job imported the public functions. `async_save` is wrapped too, to measure how long the training
    thread waits for it."""

    def __init__(self, agent: Agent, transfers: Transfers) -> None:
        self._agent, self._transfers = agent, transfers
        self._where = agent.careful("checkpoints")(_where)

    def patch_saver(self, module: ModuleType) -> None:
        """Patches torch.distributed.checkpoint.state_dict_saver."""
        save, async_save = module._save_state_dict, module.async_save
        signature, async_signature = inspect.signature(save), inspect.signature(async_save)

        @functools.wraps(save)
        def _save_state_dict(*args: Any, **kwargs: Any) -> Any:
            path = self._new_path(signature, args, kwargs, "storage_writer")
            if path is None:
                result = save(*args, **kwargs)
                if threading.get_ident() != self._agent.thread:
                    self._transfers.written()  # the thread of an `async_save` has written everything
                return result
            with self._transfers.saving(path, "dcp"):
                return save(*args, **kwargs)

        @functools.wraps(async_save)
        def covered(*args: Any, **kwargs: Any) -> Any:
            path = self._new_path(async_signature, args, kwargs, "storage_writer")
            if path is None:
                return async_save(*args, **kwargs)
            with self._transfers.saving(path, "dcp") as transfer:
                result = async_save(*args, **kwargs)
                future = getattr(result, "upload_completion", result)
                if hasattr(future, "add_done_callback"):
                    transfer.ends_later(functools.partial(_when_done, future))
                return result

        module._save_state_dict, module.async_save = _save_state_dict, covered  # type: ignore[attr-defined]

    def patch_loader(self, module: ModuleType) -> None:
        """Patches torch.distributed.checkpoint.state_dict_loader."""
        load = module._load_state_dict
        signature = inspect.signature(load)

        @functools.wraps(load)
        def _load_state_dict(*args: Any, **kwargs: Any) -> Any:
            path = self._new_path(signature, args, kwargs, "storage_reader")
            if path is None:
                return load(*args, **kwargs)
            with self._transfers.loading(path, "dcp") as transfer:
                result = load(*args, **kwargs)
                transfer.contents = kwargs.get("state_dict", args[0] if args else None)  # loaded in place
                return result

        module._load_state_dict = _load_state_dict  # type: ignore[attr-defined]

    def _new_path(self, signature: inspect.Signature, args: Any, kwargs: Any, storage: str) -> str | None:
        """The path of a save or load. None if it is nested in another save or load, and so is not reported."""
        if not (self._agent.on or storage == "storage_writer") or not self._agent.sees_saves:
            return None
        path: str | None = self._where(signature, args, kwargs, storage)
        return None if path is None or self._transfers.is_nested(path) else path


def _where(signature: inspect.Signature, args: Any, kwargs: Any, storage: str) -> str:
    given = signature.bind_partial(*args, **kwargs).arguments
    place = given.get("checkpoint_id")
    if place is None:
        at = given.get(storage)
        place = getattr(at, "checkpoint_id", None) or getattr(at, "path", None) or type(at).__name__
    return absolute(os.fspath(place) if isinstance(place, os.PathLike) else str(place))


def _when_done(future: Any, end: Callable[[bool], None]) -> None:
    future.add_done_callback(lambda done: end(not done.cancelled() and done.exception() is None))
