"""The paths of checkpoints in events. During an exploration (`torchaos explore`), the objects of an S3 store are files
in the folder of ENV_STORE: they are reported by the paths of these files."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Iterator

from .wire import ENV_STORE

_S3 = "s3://"
_UNFINISHED = ".rclone_temp_"  # names of rclone's files for objects that are not complete yet


def absolute(place: str) -> str:
    """The path to report for a path or a URL."""
    store = os.environ.get(ENV_STORE)
    if store and place.startswith(_S3):
        return os.path.normpath(os.path.join(store, place[len(_S3) :]))
    return place if "://" in place else os.path.abspath(place)


def objects() -> Iterator[tuple[str, os.stat_result]]:
    """The files of the store's objects. None without a store."""
    folders = [os.environ[ENV_STORE]] if ENV_STORE in os.environ else []
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # an object may be replaced meanwhile
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                elif not entry.name.startswith(_UNFINISHED):
                    yield entry.path, entry.stat()
