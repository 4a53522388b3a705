"""Serves a folder as an S3 store, and records the requests that change objects:

    python -m torchaos.harness.crash_explorer.s3_server FOLDER KEYS HOME

It prints its port. rclone (s3_store.py) keeps the objects as files in FOLDER. An object appears at once, when its
upload is complete (PutObject, CopyObject, CompleteMultipartUpload), so an upload that a death cuts off leaves nothing.
This process passes requests on to rclone, and notes each change of a key that begins with KEYS in HOME
(recording_log.py); with an empty HOME, it notes nothing. It ends when its standard input ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from weakref import WeakKeyDictionary

import psutil
import yarl
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web

from torchaos.harness.crash_explorer.operations import OperationKind
from torchaos.harness.crash_explorer.recording_log import RecordingLog
from torchaos.harness.crash_explorer.s3_store import Asked, Rclone

HOST = "127.0.0.1"
_DIES_S = 0.5  # seconds after the close of its connection in which a process is seen to be dead
_OF_A_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "upgrade", "te", "trailer"}  # RFC 9110, 7.6.1


class Requests:
    """Passes requests on to the store. Requests that change the same object are passed on one after the other, so that
    each change is noted."""

    def __init__(self, store: Rclone, keys: str, notes: RecordingLog | None, session: ClientSession) -> None:
        self._store, self._keys, self._notes, self._session = store, keys, notes, session
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key
        self._pids: WeakKeyDictionary[asyncio.Task[None], int] = WeakKeyDictionary()  # by the task of a connection

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        await self._store.renew()
        body = await request.read() if request.method == "POST" and "delete" in request.query else None
        asked = Asked.of(request, body)
        keys = sorted(set(asked.changes))
        async with AsyncExitStack() as stack:
            for key in keys:
                await stack.enter_async_context(self._changing[key])
            there = {key for key in keys if self._is_object(key)}
            if answer := asked.refused(bool(there)) or self._folder(asked):
                return answer
            return await self._pass_on(request, body, keys, there)

    def _is_object(self, key: str) -> bool:
        return not key.endswith("/") and (self._store.folder / key).is_file()

    def _folder(self, asked: Asked) -> web.Response | None:
        """The answer to a request that makes or removes an object for a folder. A store has no folders, and such an
        object has no bytes; rclone would make a file, which no other key can have as its beginning."""
        if asked.method == "PUT" and asked.path.endswith("/") and any(asked.changes):
            return web.Response()
        gone = asked.method == "DELETE" and any(asked.changes) and (self._store.folder / asked.path).is_dir()
        return web.Response(status=204) if gone else None

    async def _pass_on(
        self, request: web.Request, body: bytes | None, keys: list[str], there: set[str]
    ) -> web.StreamResponse:  # fmt: skip
        """Passes a request on, and notes its change. `there`: the keys at which there is an object."""
        began_s, pid = time.monotonic(), self._pid_of(request) if keys else 0
        url = yarl.URL(f"http://store{request.rel_url.raw_path_qs}", encoded=True)
        # With the client's Host, which the client has signed.
        sent = [(name, value) for name, value in request.headers.items() if name.lower() not in _OF_A_HOP]
        data = body if body is not None else request.content if request.can_read_body else None
        try:
            async with self._session.request(
                request.method, url, headers=sent, data=data, allow_redirects=False, skip_auto_headers=["User-Agent"]
            ) as answer:
                if answer.ok and self._notes:
                    ours = [key for key in keys if key.startswith(self._keys)]
                    self._note(self._notes, request, ours, there, began_s, pid)
                headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_A_HOP}
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
        except ClientError:
            await self._store.check(_DIES_S)
            raise
        await response.write_eof()
        return response

    def _note(
        self, notes: RecordingLog, request: web.Request, keys: list[str], there: set[str], began_s: float, pid: int
    ) -> None:  # fmt: skip
        for key in keys:
            path, name = self._store.folder / key, key.removeprefix(self._keys)
            if path.is_file():
                blob, size = notes.blobs.add_file(path)
                notes.add(OperationKind.PUT, name, began_s, time.monotonic(), 0, pid, size=size, blob=blob)
            elif key in there:
                notes.add(OperationKind.UNLINK, name, began_s, time.monotonic(), 0, pid)
            elif request.method != "DELETE" and "delete" not in request.query:
                notes.doubt(f"the object {name} was put, but the store does not have it by this key")
        if any(name.lower().startswith("x-amz-meta-") for name in request.headers):
            notes.doubt("objects have metadata of their own (x-amz-meta-*), which the objects of a state do not have")

    def _pid_of(self, request: web.Request) -> int:
        """The pid of the process at the other end of the connection; 0 if it is not known."""
        peer = request.transport and request.transport.get_extra_info("peername")
        if request.task not in self._pids:
            found = (each for each in psutil.net_connections("tcp4") if each.laddr == peer)
            self._pids[request.task] = next((each.pid for each in found if each.pid), 0)
        return self._pids[request.task]


async def serve(folder: Path, keys: str, home: Path | None) -> None:
    """Serves until standard input ends."""
    async with Rclone(folder) as store:
        notes = RecordingLog(home) if home else None
        async with ClientSession(
            connector=UnixConnector(store.socket, limit=0, force_close=True), timeout=ClientTimeout(),
            auto_decompress=False,
        ) as session:  # fmt: skip
            application = web.Application(client_max_size=0)  # 0: no limit
            application.router.add_route("*", "/{path:.*}", Requests(store, keys, notes, session))
            runner = web.AppRunner(application, auto_decompress=False)  # an object may be compressed
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
            print(runner.addresses[0][1], flush=True)
            await asyncio.to_thread(sys.stdin.read)
            await runner.cleanup()
        if notes:
            notes.close()


if __name__ == "__main__":
    folder_, keys_, home_ = sys.argv[1:]
    asyncio.run(serve(Path(folder_), keys_, Path(home_) if home_ else None))
