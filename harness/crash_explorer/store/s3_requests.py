"""What a request to an S3 store asks for, and the times of its objects."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.operations import Operation, OperationKind

# The times of the objects of a state: a job may take the newest object.


def date_objects(root: Path, tree: Tree, done: Iterable[Operation], began_s: float, now_s: float) -> None:
    """Gives the objects of `tree` in `root` the times at which they were put: as long before `now_s` (since the epoch)
    as they were put before the last of the operations `done`. `began_s`: when the recording began (CLOCK_MONOTONIC)."""
    puts: dict[tuple[str, str | None], float] = {}
    for put in (operation for operation in done if operation.kind is OperationKind.PUT):
        key = put.path, put.blob if put.size else None
        puts[key] = max(puts.get(key, 0.0), put.ended_s)
    last_s = max(puts.values(), default=began_s)
    for path, content in tree.files.items():
        put_s = puts.get((path, content.extents[0].blob if content.extents else None), began_s)
        os.utime(root / path, (now_s - (last_s - put_s),) * 2)


# What a request to an S3 store asks for. Source: the API Reference of Amazon S3.

_CHANGES = ("PUT", "POST", "DELETE")
# Of a request that changes something: parts of an upload, and lists of objects. All others, such as ?tagging, change
# something that the store does not keep; rclone would take them for the contents of the object.
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
        """The answer to a request that the store can't carry out. `is_there`: whether its object exists."""
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
    return web.Response(status=status, text=_ERROR.format(code, message), content_type="application/xml")
