"""Saves and loads by torch.distributed.checkpoint.

`save`, `save_state_dict` and the thread of `async_save` all call `_save_state_dict` through its module, and every load
calls `_load_state_dict`. So these two are wrapped: it does not matter under which name the job imported the public
functions. `async_save` is wrapped too, to measure how long the training thread waits for it."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from types import ModuleType
from typing import Any, Callable

from ..agent import Agent
from .checkpoint_hooks import Transfers
from .saved_files import absolute


class DistributedCheckpointHook:
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
