"""Writes a manifest (protocol/wire.py) for each save, by wrapping torch.save, safetensors, Lightning and the
streams of torch.distributed.checkpoint.

If bytes pass through Python on their way to the file (torch.distributed.checkpoint, open files, Lightning, torch's
format from before 1.6), all bytes of the file are digested as they pass. If torch or safetensors write a file by
themselves, the tensors are digested in memory during the save. Their places in the file, and the bytes between them
(headers, directories), are read from the file afterwards. Helper threads do this work.

The job's own call is made exactly once, even if this code fails. A failure switches manifests off and is reported."""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any, Callable

from ..agent import Agent
from .digesting_writers import Records, Stream, Tee, Tensors, WithoutDescriptor
from .manifest_writer import HOOK, ManifestWriter, spans_of_safetensors, spans_of_zip
from .saved_files import absolute

Call = Callable[..., Any]


class ManifestHook:
    """Wraps the calls that write checkpoints."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._ledger = ManifestWriter(agent)
        self._thread = threading.local()
        careful = agent.careful(HOOK)
        self._tee, self._old_tee = careful(self._new_tee), careful(self._new_old_tee)
        self._tensors, self._handed = careful(self._new_tensors), careful(self._hand_over)
        self._from_file, self._whole = careful(self._ledger.from_file), careful(self._add_whole)

    @property
    def _on(self) -> bool:
        return self._agent.on and HOOK not in self._agent.broken

    def settle(self) -> None:
        self._ledger.settle()

    def ended(self) -> None:
        self._ledger.ended()

    # -- torch.save ----------------------------------------------------------------------------------------------

    def torch_save(self, original: Call, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Digests a torch.save to a path or an open file."""
        target = kwargs.get("f", args[1] if len(args) > 1 else None)
        if not self._on:
            return original(*args, **kwargs)
        if kwargs.get("_use_new_zipfile_serialization", args[4] if len(args) > 4 else True) is False:
            return self._old_form(original, path, target, args, kwargs)
        if not isinstance(target, (str, os.PathLike)):
            return self._through_tee(original, path, target, args, kwargs)
        tensors = self._tensors()
        self._thread.tensors = tensors
        try:
            result = original(*args, **kwargs)
        finally:
            self._thread.tensors = None
            self._ledger.wait_for_digests()
        self._from_file(path, tensors, spans_of_zip, crcs=False)
        return result

    def torch_save_in_memory(self, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Digests a torch.save to a buffer, which `atomic_save` then writes to a file."""
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

    def _old_form(self, original: Call, path: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Digests a torch.save in the format from before torch 1.6. `patch_serialization` inserts the Tee
        (digesting_writers.py) after torch has opened the file."""
        is_path = isinstance(target, (str, os.PathLike))
        old: list[Tee] | None = [] if is_path or _at_start(target) else None
        self._thread.old = old
        try:
            result = original(*args, **kwargs)
        finally:
            self._thread.old = None
        if old:
            self._whole(path, path, old[0], None if is_path else target)
        return result

    def patch_serialization(self, module: ModuleType) -> None:
        """Patches torch.serialization: the functions that write a zip file record by record, and the older format."""
        save, old_save = module._save, module._legacy_save

        def _save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = getattr(self._thread, "tensors", None)
            return save(obj, zip_file if tensors is None else Records(zip_file, tensors), *args, **kwargs)

        def _legacy_save(obj: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            old = getattr(self._thread, "old", None)
            tee = self._old_tee(file) if old is not None else None
            if tee is not None and old is not None:
                old.append(tee)
            return old_save(obj, file if tee is None else tee, *args, **kwargs)

        module._save, module._legacy_save = _save, _legacy_save  # type: ignore[attr-defined]

    # -- safetensors, Lightning ----------------------------------------------------------------------------------

    def safetensors(self, original: Call, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Digests a safetensors.torch.save_file."""
        contents = kwargs.get("tensors", args[0] if args else None)
        tensors = self._tensors() if self._on else None
        if tensors is None:
            return original(*args, **kwargs)
        self._handed(tensors, contents)
        try:
            result = original(*args, **kwargs)
        finally:
            self._ledger.wait_for_digests()
        self._from_file(path, tensors, spans_of_safetensors, crcs=True)
        return result

    def atomic_save(self, original: Call, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Digests Lightning's save: torch.save to memory, then a write of these bytes to a file."""
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
        """Patches torch.distributed.checkpoint.filesystem and its fsspec version. Both write through one function."""
        create = module.FileSystem.create_stream

        def create_stream(system: Any, path: Any, mode: str) -> Any:
            inner = create(system, path, mode)
            plain = mode in ("wb", "xb") and self._on and "checkpoints" in self._agent.live

            def closed(tee: Tee, about: os.stat_result | None) -> None:
                self._stream_closed(path, tee, about)

            return Stream(inner, self._tee, closed) if plain else inner

        module.FileSystem.create_stream = create_stream

    def _stream_closed(self, path: Any, tee: Tee, about: os.stat_result | None) -> None:
        path = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
        path = absolute(path)
        self._whole(path, os.path.dirname(path), tee, None, about)

    # -- all of them ---------------------------------------------------------------------------------------------

    def _new_tee(self, target: Any) -> Tee | None:
        return Tee(target, self._ledger.digester) if hasattr(target, "write") else None

    def _new_old_tee(self, target: Any) -> Tee | None:
        return WithoutDescriptor(target, self._ledger.digester) if hasattr(target, "write") else None

    def _new_tensors(self) -> Tensors:
        return Tensors(self._ledger.digester)

    def _hand_over(self, tensors: Tensors, contents: Any) -> None:
        sizes = [(name, tensor, tensor.numel() * tensor.element_size()) for name, tensor in contents.items()]
        if any(size for _, _, size in sizes):
            tensors.add_all(sizes)

    def _add_whole(self, path: str, save: str, tee: Tee, file: Any, about: os.stat_result | None = None) -> None:
        """Adds a file of which every byte passed through `tee`. `save`: the same path, or the folder if a folder is
        saved. `file`: the job's own file object, still open, or None."""
        if file is not None:
            file.flush()
            about = os.fstat(file.fileno())
            if not tee.error and about.st_size != tee.digester.size:
                tee.error = f"{about.st_size} bytes are in it, and {tee.digester.size} passed through Python"
        elif about is None and "://" not in path:
            about = os.stat(path)
        crcs = isinstance(tee, WithoutDescriptor) or path.endswith(".safetensors")  # other formats have CRCs
        self._ledger.whole(path, save, tee, about, crcs)


def _with(args: tuple[Any, ...], kwargs: dict[str, Any], tee: Tee) -> tuple[Any, ...]:
    return (args[0], tee, *args[2:]) if args else (kwargs.pop("obj"), tee)


def _at_start(file: Any) -> bool:
    try:
        return bool(file.tell() == 0 and file.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False
