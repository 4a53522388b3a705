"""torchaos's own S3 store, in place of the store that a job uses. `rclone serve s3`, at a Unix socket, keeps the
objects. `Asked` reads what a request asks for (source: the API Reference of Amazon S3). `date_objects` sets the times
of the objects of a state, because a job may take the newest object."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from torchaos.harness import registry
from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.operations import Operation, OperationKind
from torchaos.harness.host.processes import end_with
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import ENV_STORE
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

if TYPE_CHECKING:
    from aiohttp import web


def date_objects(root: Path, tree: Tree, done: Iterable[Operation], began_s: float, now_s: float) -> None:
    """Gives the objects of `tree` in `root` the times at which they were put, moved so that the last of the operations
    `done` comes just before `now_s` (since the epoch). `began_s`: when the recording began (CLOCK_MONOTONIC)."""
    puts: dict[tuple[str, str | None], float] = {}
    for put in (operation for operation in done if operation.kind is OperationKind.PUT):
        key = put.path, put.blob if put.size else None
        puts[key] = max(puts.get(key, 0.0), put.ended_s)
    last_s = max(puts.values(), default=began_s)
    for path, content in tree.files.items():
        put_s = puts.get((path, content.extents[0].blob if content.extents else None), began_s)
        os.utime(root / path, (now_s - (last_s - put_s),) * 2)


_CHANGES = ("PUT", "POST", "DELETE")
# The query parameters of requests that change an object: parts of an upload, and lists of objects. All others, such as
# ?tagging, change something that the store does not keep; rclone would take their body for the contents of the object.
_KNOWN = {"uploadId", "partNumber", "uploads", "delete", "x-id"}
_ELSEWHERE = {"acl", "attributes", "legal-hold", "retention", "tagging", "torrent"}  # of a request that reads
_ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>{}</Message></Error>"


@dataclass(frozen=True)
class Asked:
    """A request. `path`: bucket and key. `listed`: the keys of a request that deletes several objects."""

    method: str
    path: str
    query: frozenset[str]
    condition: str  # of a write: `If-None-Match`, `If-Match`, or both; empty: none
    listed: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: web.Request, body: bytes | None) -> Asked:
        path = unquote(request.rel_url.raw_path).lstrip("/")
        given = ((name, request.headers.get(name)) for name in ("If-None-Match", "If-Match"))
        condition = ", ".join(f"{name}: {value}" for name, value in given if value is not None)
        query = frozenset(name for name in request.query if not name.startswith("X-Amz-"))
        return cls(request.method, path, query, condition, tuple(_listed(body)) if body else ())

    @property
    def is_list(self) -> bool:
        return self.method == "POST" and "delete" in self.query

    @property
    def changes(self) -> Iterator[str]:
        """The objects that the request changes when it is complete, each with its bucket."""
        bucket = self.path.split("/", 1)[0]
        if self.is_list:
            yield from (f"{bucket}/{key}" for key in self.listed)
        elif "/" in self.path.rstrip("/") and (
            (self.method in ("PUT", "DELETE") and "uploadId" not in self.query)
            or (self.method == "POST" and "uploadId" in self.query)  # CompleteMultipartUpload
        ):
            yield self.path

    def refused(self, is_there: bool) -> web.Response | None:
        """The answer to a request that the store can't carry out; None if it can. `is_there`: whether the object of the
        request exists."""
        changes = self.method in _CHANGES
        unknown = self.query - _KNOWN if changes else self.query & _ELSEWHERE
        form = self.method == "POST" and not self.query
        if unknown or form:
            return _error(501, "NotImplemented", f"this store does not know {', '.join(sorted(unknown)) or 'forms'}")
        if not changes or not self.condition or not any(self.changes):
            return None
        if self.condition != "If-None-Match: *":
            return _error(501, "NotImplemented", f"this store does not know {self.condition}")
        return _error(412, "PreconditionFailed", "the object exists") if is_there else None


def _listed(body: bytes) -> Iterator[str]:
    """The keys in the body of a DeleteObjects request. Raises ET.ParseError."""
    for each in ET.fromstring(body).iter():
        if each.tag.rpartition("}")[2] == "Key" and each.text:
            yield each.text


def _error(status: int, code: str, message: str) -> web.Response:
    from aiohttp import web  # of an extra

    return web.Response(status=status, text=_ERROR.format(code, message), content_type="application/xml")


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
        """Ends this process if the server has died, or dies within `wait_s` seconds. Otherwise a job without its store
        would seem to fail by itself."""
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


FOLDER = "store"  # in the job's folder {run}; it has a folder for each bucket
_ENDPOINT, _PORT = "AWS_ENDPOINT_URL", "{store}"
# Without the first three, a job would ask for credentials that it can't get here. The others might lead the job to
# another store, or to the store through a proxy.
_FIXED = {
    "AWS_ACCESS_KEY_ID": "torchaos", "AWS_SECRET_ACCESS_KEY": "torchaos", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
}  # fmt: skip
_OF_S3 = f"{_ENDPOINT}_S3"  # goes before the other, if it is set
_SERVER = "torchaos.harness.crash_explorer.s3_server"
_END_S = 60.0


def in_folder(plan: Plan) -> Plan:
    """The plan. If its checkpoints are in an S3 store, they are replaced by a folder below {run}, which `StoreServer`
    serves to the job. Raises UsageError if the job can't have such a store."""
    job, place = plan.job, plan.job.checkpoints or ""
    if "://" not in place:
        return plan
    url, refused = urlsplit(place), ""
    if url.scheme != "s3" or not url.netloc:
        refused = "only s3://BUCKET/KEYS is known of all object stores"
    elif job.nodes > 1 or not registry.find("launchers", plan.launcher).in_host_network:
        refused = "the store of an exploration can be reached by a job on this machine alone, with launcher: local"
    elif find_spec("aiohttp") is None:
        refused = "aiohttp is missing: pip install 'torchaos[object-store]'"
    if refused:
        raise UsageError(f"{plan.scenario}: its checkpoints are at {place}: {refused}")
    folder = "/".join(("{run}", FOLDER, url.netloc, *url.path.split("/"))).rstrip("/")
    address = f"http://127.0.0.1:{_PORT}"
    env = {**job.env, **_FIXED, _ENDPOINT: address, _OF_S3: address, ENV_STORE: f"{{run}}/{FOLDER}"}
    return replace(plan, job=replace(job, checkpoints=folder, env=env))


def is_stored(plan: Plan) -> bool:
    """Whether the checkpoints of the plan are in a store."""
    return _PORT in plan.job.env.get(_ENDPOINT, "")


def store_in_shell(env: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """For a script that shows a failure: the shell lines that start the store of `$run`, and the job's environment
    without the store's variables. No lines if there is no store."""
    if _PORT not in env.get(_ENDPOINT, ""):
        return [], env
    own = {ENV_STORE, _ENDPOINT, _OF_S3, *_FIXED}
    lines = [
        "# The store of the objects, which accepts all credentials. rclone: https://rclone.org/install",
        f'rclone serve s3 --addr "127.0.0.1:${{PORT:=9321}}" "$run"/{FOLDER} &',
        "trap 'kill $!' EXIT",
        "sleep 2",
        "kill -0 $!",
        *(f'export {name}="http://127.0.0.1:$PORT"' for name in (_ENDPOINT, _OF_S3)),
        *(f"export {name}={value}" for name, value in _FIXED.items()),
    ]
    return lines, {name: value for name, value in env.items() if name not in own}


class StoreServer:
    """A `with` block that gives the plan of a job that runs in `folder`. If its checkpoints are in a store, the store
    lives during the block. `log`: the log of the store; `notes`: the folder for the notes of a recording."""

    def __init__(self, plan: Plan, folder: RunDir, log: Path, notes: Path | None = None) -> None:
        self.plan = plan
        self._folder, self._log, self._notes = folder, log, notes
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> StoreServer:
        """Raises ChaosError if the store can't be started."""
        if not is_stored(self.plan):
            return self
        root, job = self._folder.job / FOLDER, self.plan.job
        keys = Path(str(job.checkpoints).replace("{run}", str(self._folder.job)))
        keys.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", _SERVER, str(root), f"{keys.relative_to(root)}/", str(self._notes or "")]
        with open(self._log, "ab") as said:
            self._server = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
            )
        assert self._server.stdout
        port = self._server.stdout.readline().strip()
        if not port:
            self._end()
            raise ChaosError(f"no store can be started: {self._last_words or 'no reason was given'}")
        env = {name: value.replace(_PORT, port) for name, value in job.env.items()}
        self.plan = replace(self.plan, job=replace(job, env=env))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raises ChaosError if the store died."""
        try:
            if error is None:
                self.check()
        finally:
            self._end()
        if error is None and self._server and self._server.returncode:
            raise ChaosError(self._died)

    def check(self) -> None:
        """Raises ChaosError if the store has died: then the outcome of a resume says nothing about its state."""
        if self._server and self._server.poll() is not None:
            raise ChaosError(self._died)

    @property
    def _died(self) -> str:
        assert self._server
        words = f"the store of the exploration died, with exit code {self._server.returncode}"
        return f"{words}: {self._last_words}; see {self._log}"

    @property
    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _end(self) -> None:
        if self._server:
            with self._server:
                try:
                    self._server.communicate(timeout=_END_S)
                except subprocess.TimeoutExpired:
                    self._server.kill()
