"""The program that keeps objects as files in a folder: `rclone serve s3`, at a Unix socket."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torchaos.harness.machine.parent_death import end_with

_START_S, _LOOK_S = 30.0, 0.005


class Rclone:
    """The server, in an `async with` block. If the folder was removed and made again, `renew` starts a new server: the
    old one remembers the old folder, and unfinished uploads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = f"torchaos-store-{secrets.token_hex(8)}"
        self._server: asyncio.subprocess.Process | None = None
        self._known = -1  # a descriptor of the folder that the server knows
        self._lock = asyncio.Lock()

    @property
    def socket(self) -> str:
        """The address of the server: an abstract socket (unix(7)), of which nothing is left when it dies."""
        return f"\0{self._name}"

    async def __aenter__(self) -> Rclone:
        await self.renew()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:  # fmt: skip
        await self._end()

    async def renew(self) -> None:
        async with self._lock:
            if self._known >= 0 and os.path.samestat(os.fstat(self._known), self.folder.stat()):
                await self.check()
                return
            await self._end()
            self._known = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            await self._start()

    async def check(self, wait_s: float = 0.0) -> None:
        """Ends this process if the server has died, or dies within so many seconds: without it, a job would seem to
        fail by itself."""
        assert self._server
        end = time.monotonic() + wait_s
        while self._server.returncode is None and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        if self._server.returncode is not None:
            print(f"rclone died with exit code {self._server.returncode}", file=sys.stderr, flush=True)
            os._exit(1)

    async def _start(self) -> None:
        places = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        program = shutil.which("rclone", path=os.pathsep.join(places))
        if program is None:
            sys.exit("rclone is missing: put rclone 1.65 or newer on the PATH (https://rclone.org/install)")
        here = os.getpid()
        # Digests of all objects for each listing (--etag-hash) would cost a read of all checkpoints.
        argv = [program, "serve", "s3", "--addr", f"unix://@{self._name}", "--etag-hash", "", "--config"]
        argv += [os.devnull, str(self.folder)]
        self._server = await asyncio.create_subprocess_exec(*argv, preexec_fn=lambda: end_with(here))
        end = time.monotonic() + _START_S
        while not await self._listens():
            if self._server.returncode is not None or time.monotonic() > end:
                sys.exit("rclone does not serve")
            await asyncio.sleep(_LOOK_S)

    async def _listens(self) -> bool:
        try:
            _reader, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return False
        writer.close()
        return True

    async def _end(self) -> None:
        if self._server:
            with suppress(ProcessLookupError):
                self._server.kill()
            await self._server.wait()
            os.close(self._known)
