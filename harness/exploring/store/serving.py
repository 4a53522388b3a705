"""Serves a folder as an S3 store, and records the requests that change objects:

    python -m torchaos.harness.exploring.store.serving FOLDER KEYS HOME

It prints its port. rclone (rclone.py) keeps the objects as files in FOLDER. An object appears at once, when its upload
is complete (PutObject, CopyObject, CompleteMultipartUpload), so an upload that a death cuts off leaves nothing. This
process passes requests on to rclone, and notes each change of a key that begins with KEYS in HOME (notes.py); with an
empty HOME, it notes nothing. It ends when its standard input ends."""

from __future__ import annotations

import asyncio
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import psutil
import yarl
from aiohttp import ClientSession, ClientTimeout, UnixConnector, web

from torchaos.harness.exploring.notes import Notes
from torchaos.harness.exploring.operations import Kind
from torchaos.harness.exploring.store.rclone import Rclone

HOST = "127.0.0.1"
_OF_A_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "upgrade", "te", "trailer"}  # RFC 9110, 7.6.1


class Requests:
    """Passes requests on to the store. Requests that change the same object are passed on one after the other, so that
    each change is noted."""

    def __init__(self, store: Rclone, keys: str, notes: Notes | None, session: ClientSession) -> None:
        self._store, self._keys, self._notes, self._session = store, keys, notes, session
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key
        self._pids: WeakKeyDictionary[asyncio.Task[None], int] = WeakKeyDictionary()  # by the task of a connection

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        await self._store.renew()
        body = await request.read() if "delete" in request.query else None  # a list of objects to delete
        keys = sorted(set(_changed(request, body))) if self._notes else []
        with ExitStack() as stack:
            for key in keys:
                await self._changing[key].acquire()
                stack.callback(self._changing[key].release)
            return await self._pass_on(request, body, [key for key in keys if key.startswith(self._keys)])

    async def _pass_on(self, request: web.Request, body: bytes | None, keys: list[str]) -> web.StreamResponse:
        began_s, pid = time.monotonic(), self._pid_of(request) if keys else 0
        url = yarl.URL(f"http://store{request.rel_url.raw_path_qs}", encoded=True)
        # With the client's Host, which the client has signed.
        sent = [(name, value) for name, value in request.headers.items() if name.lower() not in _OF_A_HOP]
        data = body if body is not None else request.content if request.can_read_body else None
        async with self._session.request(
            request.method, url, headers=sent, data=data, allow_redirects=False, skip_auto_headers=["User-Agent"]
        ) as answer:
            if answer.ok:
                self._note(keys, began_s, pid)
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_A_HOP}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
        await response.write_eof()
        return response

    def _note(self, keys: list[str], began_s: float, pid: int) -> None:
        for key in keys:
            assert self._notes is not None
            path, name = self._store.folder / key, key.removeprefix(self._keys)
            if path.is_file():
                blob, size = self._notes.blobs.add_file(path)
                self._notes.add(Kind.PUT, name, began_s, time.monotonic(), 0, pid, size=size, blob=blob)
            elif not path.exists():
                self._notes.add(Kind.UNLINK, name, began_s, time.monotonic(), 0, pid)

    def _pid_of(self, request: web.Request) -> int:
        """The process at the other end of the connection; 0: it is not known."""
        peer = request.transport and request.transport.get_extra_info("peername")
        if request.task not in self._pids:
            found = (each for each in psutil.net_connections("tcp4") if each.laddr == peer)
            self._pids[request.task] = next((each.pid for each in found if each.pid), 0)
        return self._pids[request.task]


def _changed(request: web.Request, body: bytes | None) -> Iterator[str]:
    """The keys of the objects that a request may change. Each begins with the name of its bucket. Source: the API
    Reference of Amazon S3."""
    path = unquote(request.rel_url.raw_path).strip("/")
    if body is not None:  # DeleteObjects
        keys = (each.text for each in ET.fromstring(body).iter() if each.tag.rpartition("}")[2] == "Key")
        yield from (f"{path}/{key}" for key in keys if key)
    elif "/" in path and (
        (request.method in ("PUT", "DELETE") and not {"uploadId", "tagging", "acl"} & request.query.keys())
        or (request.method == "POST" and "uploadId" in request.query)  # CompleteMultipartUpload
    ):
        yield path


async def serve(folder: Path, keys: str, home: Path | None) -> None:
    """Serves until standard input ends."""
    async with Rclone(folder) as store:
        notes = Notes(home) if home else None
        async with ClientSession(
            connector=UnixConnector(str(store.socket), limit=0, force_close=True), timeout=ClientTimeout(),
            auto_decompress=False,
        ) as session:  # fmt: skip
            application = web.Application(client_max_size=0)  # 0: no limit
            application.router.add_route("*", "/{path:.*}", Requests(store, keys, notes, session))
            runner = web.AppRunner(application)
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
