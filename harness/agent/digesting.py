"""Lets each save leave a manifest (manifest.py): what covers torch.save, safetensors, Lightning and DCP's streams.

The job's own call is made exactly once, whatever fails here; what fails switches manifests off and is reported.
"""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Callable

from .agent import Agent
from .manifest import (
    ALGORITHM,
    FOLDER,
    Helper,
    Manifest,
    Tee,
    Tensors,
    rest_of,
    spans_of_safetensors,
    spans_of_zip,
    with_crcs,
)

HOOK = "manifests"
_KEPT = 3  # folders that DCP may be writing to at the same time
_BEHIND = 16  # files that may wait for their CRCs; later ones do without
_PATIENCE_S = 10.0  # for the CRCs at the end of the process
Call = Callable[..., Any]
_Spans = Callable[[BinaryIO, "dict[str, tuple[int, str]]"], "list[tuple[int, int, str]]"]


class Digesting:
    """Covers the calls that write, and keeps one manifest for each save."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._folder = Path(agent.plan.events).parent / "agent" / FOLDER
        self._number, self._lock = count(), threading.Lock()
        self._thread = threading.local()
        self._helpers: dict[str, Helper] = {}
        self._by_folder: dict[str, Manifest] = {}  # the newest of each folder that DCP saves to
        careful = agent.careful(HOOK)
        self._tee, self._tensors, self._handed = (
            careful(self._new_tee),
            careful(self._new_tensors),
            careful(self._hand_over),
        )
        self._from_file, self._whole = careful(self._add_from_file), careful(self._add_whole)

    @property
    def _on(self) -> bool:
        return self._agent.on and HOOK not in self._agent.broken

    # -- torch.save ----------------------------------------------------------------------------------------------

    def torch_save(self, original: Call, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch.save to a path or an open file."""
        target = kwargs.get("f", args[1] if len(args) > 1 else None)
        if not self._on or kwargs.get("_use_new_zipfile_serialization", args[4] if len(args) > 4 else True) is False:
            return original(*args, **kwargs)
        if not isinstance(target, (str, os.PathLike)):
            return self._through_tee(original, path, target, args, kwargs)
        tensors = self._tensors()
        self._thread.tensors = tensors
        try:
            result = original(*args, **kwargs)
        finally:
            self._thread.tensors = None
            self._finish()
        self._from_file(path, tensors, spans_of_zip)
        return result

    def torch_save_in_memory(self, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch.save to a buffer, which `atomic_save` then writes to a file."""
        buffers = getattr(self._thread, "buffers", None)
        target = kwargs.get("f", args[1] if len(args) > 1 else None)
        tee = self._tee(target) if buffers is not None and self._on else None
        if tee is None or buffers is None:
            return original(*args, **kwargs)
        buffers.append(tee)
        return original(*_with(args, kwargs, tee), **{name: kwargs[name] for name in kwargs if name != "f"})

    def _through_tee(self, original: Call, path: str, target: Any, args: Any, kwargs: Any) -> Any:
        tee = self._tee(target) if _at_start(target) else None
        if tee is None:
            return original(*args, **kwargs)
        result = original(*_with(args, kwargs, tee), **{name: kwargs[name] for name in kwargs if name != "f"})
        self._whole(path, path, tee, target)
        return result

    def patch_serialization(self, module: ModuleType) -> None:
        """torch.serialization: what torch.save writes to a zip file, record by record."""
        save = module._save

        def _save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = getattr(self._thread, "tensors", None)
            return save(obj, zip_file if tensors is None else _Records(zip_file, tensors), *args, **kwargs)

        module._save = _save  # type: ignore[attr-defined]

    # -- safetensors, Lightning ----------------------------------------------------------------------------------

    def safetensors(self, original: Call, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """safetensors.torch.save_file."""
        contents = kwargs.get("tensors", args[0] if args else None)
        tensors = self._tensors() if self._on else None
        if tensors is None:
            return original(*args, **kwargs)
        self._handed(tensors, contents)
        try:
            result = original(*args, **kwargs)
        finally:
            self._finish()
        self._from_file(path, tensors, spans_of_safetensors)
        return result

    def atomic_save(self, original: Call, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lightning's: torch.save to memory, which is then written to a file."""
        buffers: list[Tee] = []
        self._thread.buffers = buffers
        try:
            result = original(*args, **kwargs)
        finally:
            self._thread.buffers = None
        if len(buffers) == 1 and self._on:
            self._whole(path, path, buffers[0], None)
        return result

    # -- torch.distributed.checkpoint ----------------------------------------------------------------------------

    def patch_streams(self, module: ModuleType) -> None:
        """torch.distributed.checkpoint.filesystem, and its kin for fsspec: all writing goes through one call."""
        create = module.FileSystem.create_stream

        def create_stream(system: Any, path: Any, mode: str) -> Any:
            inner = create(system, path, mode)
            plain = mode in ("wb", "xb") and self._on and "checkpoints" in self._agent.live
            return _Stream(self, inner, path) if plain else inner

        module.FileSystem.create_stream = create_stream

    def stream_opened(self, file: Any) -> Tee | None:
        return self._tee(file)

    def stream_closed(self, path: Any, tee: Tee, about: os.stat_result | None) -> None:
        path = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
        path = path if "://" in path else os.path.abspath(path)
        self._whole(path, os.path.dirname(path), tee, None, about)

    # -- all of them ---------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """The process ends: what is still being digested is waited for, and for a while the CRCs."""
        for name in ("digests", "layouts", "crcs"):
            if name in self._helpers:
                self._helpers[name].finish(_PATIENCE_S if name == "crcs" else None)

    def _helper(self) -> Helper:
        """What a save waits for at its end."""
        return self._helper_for("digests")

    def _helper_for(self, what: str) -> Helper:
        with self._lock:
            if what not in self._helpers:
                self._helpers[what] = Helper(4 if what == "digests" else 0, idle=what == "crcs")
            return self._helpers[what]

    def _finish(self) -> None:
        if "digests" in self._helpers:
            self._helpers["digests"].finish()

    def _new_tee(self, target: Any) -> Tee | None:
        return Tee(target, self._helper) if hasattr(target, "write") else None

    def _new_tensors(self) -> Tensors:
        return Tensors(self._helper)

    def _hand_over(self, tensors: Tensors, contents: Any) -> None:
        sizes = [(name, one, one.numel() * one.element_size()) for name, one in contents.items()]
        if any(size for _, _, size in sizes):
            self._helper().do(lambda: tensors.add_all(sizes))

    def _add_from_file(self, path: str, tensors: Tensors, spans_of: _Spans) -> None:
        """What lies where is read from the file, in the background. It is opened now: it may be renamed at once."""
        manifest = self._new(path)
        if tensors.error:
            manifest.lose(path, tensors.error)
            manifest.write()
            return
        file = self._opened(path)

        def work() -> None:
            try:
                if isinstance(file, OSError):
                    raise file
                spans = spans_of(file, tensors.digests)
                rest = rest_of(file, os.fstat(file.fileno()).st_size, spans)
                manifest.add(path, file.fileno(), spans, rest)
            except Exception as error:
                manifest.lose(path, f"{type(error).__name__}: {error}")
                manifest.write()
                return
            manifest.write()
            self._crcs_later(manifest, path, file, spans)

        self._helper_for("layouts").do(self._agent.careful(HOOK)(work))

    def _opened(self, path: str) -> BinaryIO | OSError:
        """By a thread of ours, so that no fault of the storage mistakes it for something that the job does."""
        found: list[BinaryIO | OSError] = []

        def work() -> None:
            try:
                found.append(open(path, "rb"))  # noqa: SIM115 (whoever reads it closes it)
            except OSError as error:
                found.append(error)
            finally:
                done.set()

        done = threading.Event()
        self._helper().do(work)
        done.wait()
        return found[0]

    def _crcs_later(self, manifest: Manifest, path: str, file: BinaryIO, spans: list[tuple[int, int, str]]) -> None:
        def work() -> None:
            with file:
                try:
                    found = with_crcs(file, spans)
                except OSError:
                    return
            if found is not None:
                manifest.add_crcs(path, found)
                manifest.write()

        if ALGORITHM == "crc32" or self._helper_for("crcs").waiting() >= _BEHIND:
            file.close()
        else:
            self._helper_for("crcs").do(self._agent.careful(HOOK)(work))

    def _add_whole(self, path: str, save: str, tee: Tee, file: Any, about: os.stat_result | None = None) -> None:
        """A file of which every byte was digested on its way."""
        if file is not None:
            file.flush()
            about = os.fstat(file.fileno())
        elif about is None and "://" not in path:
            about = os.stat(path)
        with self._lock:
            manifest = self._by_folder.get(save) if save != path else None
            if manifest is None or manifest.has(path):
                manifest = self._new(save)
                if save != path:
                    self._by_folder = {save: manifest, **dict(list(self._by_folder.items())[:_KEPT])}
        if not tee.error and file is not None and about is not None and about.st_size != tee.digester.size:
            tee.error = f"{about.st_size} bytes are in it, and {tee.digester.size} passed through Python"
        if tee.error:
            manifest.lose(path, tee.error)
        else:
            digester = tee.digester
            digests = digester.digests()
            manifest.add_whole(path, about, digester.size, digests)
            again = self._opened(path) if about is not None else None
            if again is not None and not isinstance(again, OSError):
                self._crcs_later(manifest, path, again, [(0, digester.size, digests)])
        manifest.write()

    def _new(self, save: str) -> Manifest:
        who = self._agent.who
        name = f"rank{who.rank}-attempt{who.attempt}-{next(self._number)}-{who.pid}.json"
        return Manifest(self._folder, name, save, who.attempt)


class _Records:
    """A writer of zip files that tells what it is given."""

    def __init__(self, zip_file: Any, tensors: Tensors) -> None:
        self._zip_file, self._tensors = zip_file, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zip_file, name)

    def write_record(self, name: str, data: Any, size: int) -> Any:
        if size and not isinstance(data, int):  # an address, in old versions
            self._tensors.add(name, data, size)
        elif size:
            self._tensors.error = "torch gave an address only"
        return self._zip_file.write_record(name, data, size)


class _Stream:
    """The context in which DCP writes one file."""

    def __init__(self, digesting: Digesting, inner: Any, path: Any) -> None:
        self._digesting, self._inner, self._path = digesting, inner, path
        self._tee: Tee | None = None
        self._about: os.stat_result | None = None

    def __enter__(self) -> Any:
        file = self._inner.__enter__()
        self._tee = self._digesting.stream_opened(file)
        try:
            self._about = os.fstat(file.fileno())
        except (AttributeError, OSError, ValueError):
            pass  # on something that is no local file system
        return file if self._tee is None else self._tee

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        result = self._inner.__exit__(kind, error, trace)
        if error is None and self._tee is not None:
            self._digesting.stream_closed(self._path, self._tee, self._about)
        return result


def _with(args: tuple[Any, ...], kwargs: dict[str, Any], tee: Tee) -> tuple[Any, ...]:
    return (args[0], tee, *args[2:]) if args else (kwargs.pop("obj"), tee)


def _at_start(file: Any) -> bool:
    try:
        return bool(file.tell() == 0 and file.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False
