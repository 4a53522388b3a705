"""The contents of a container: the user's image, or the host's own Python and programs, read-only.

For the host's programs, an image of a few kilobytes is made for the run. Nothing is downloaded or copied."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from torchaos.harness.machine.docker_engine import RUN
from torchaos.harness.record.environment import editable, job_python

HOST = "host"  # stands in place of an image's name
_PROGRAMS = ("bin", "lib", "lib32", "lib64", "libx32")  # links into /usr, or folders
_FOLDERS = ("dev", "etc", "proc", "run", "sbin", "sys", "tmp", "usr", "var", "var/tmp")  # sbin: for the engine's init
_COPIED = ("etc/passwd", "etc/group", "etc/ld.so.cache", "etc/localtime")
_NAMES = b"passwd: files\ngroup: files\nhosts: files\n"  # no name server is asked: there is none


def make_host_image(client: Any, run_id: str, name: str) -> str:
    """Makes the image and returns its name. Raises the errors of the client."""
    client.import_image_from_data(_root(), repository=name, tag="latest", changes=[f'LABEL {RUN}="{run_id}"'])
    return f"{name}:latest"


def _root() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        home = os.path.expanduser("~").strip("/")
        for folder in (*_FOLDERS, *(program for program in _PROGRAMS if _is_folder(program)), home):
            _add(tar, folder, tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755)
        for link in _PROGRAMS:
            if os.path.islink(f"/{link}"):
                _add(tar, link, tarfile.SYMTYPE, 0o777, target=os.readlink(f"/{link}"))
        for path in _COPIED:
            if os.path.isfile(f"/{path}"):
                _add(tar, path, tarfile.REGTYPE, 0o644, Path(f"/{path}").read_bytes())
        _add(tar, "etc/nsswitch.conf", tarfile.REGTYPE, 0o644, _NAMES)
    return made.getvalue()


def _add(tar: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"", target: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname = kind, mode, len(data), target
    tar.addfile(member, io.BytesIO(data))


def _is_folder(name: str) -> bool:
    return os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")


def host_mounts(command: Sequence[str]) -> Iterator[Path]:
    """The folders of this machine without which the command would not run in the container as it does here. They are
    mounted read-only."""
    yield Path("/usr")
    yield from (Path(f"/{name}") for name in _PROGRAMS if _is_folder(name))
    yield from (path for path in (Path("/etc/alternatives"), Path("/etc/ssl")) if path.is_dir())
    python = job_python(command)
    yield from _prefixes(python)
    yield from editable(python)
    for word in command:
        path = Path(word.rpartition("=")[2])
        if path.is_absolute() and path.is_file():
            yield path.parent


def own_mounts() -> Iterator[Path]:
    """The folders of the agent and of the injectors that it loads. Every image needs them."""
    for name in ("harness", "injectors", "plugin", "scenarios"):
        yield Path(str(files(f"torchaos.{name}")))


def _prefixes(python: str) -> Iterator[Path]:
    code = "import sys; print(*{sys.prefix, sys.base_prefix, sys.exec_prefix}, sep='\\n')"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    yield from map(Path, done.stdout.splitlines())


def covering(paths: Iterable[Path]) -> list[Path]:
    """The folders, without those that are below another folder in the list. The root is left out too, because nothing
    can be mounted over it."""
    found: list[Path] = []
    for path in sorted({path.resolve() for path in paths} | {path.absolute() for path in paths}):
        if path != Path("/") and not any(path.is_relative_to(folder) for folder in found):
            found.append(path)
    return found
