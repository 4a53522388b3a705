"""An HTTP server on this machine that keeps what it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@dataclass
class Server:
    url: str
    raw: list[bytes] = field(default_factory=list)
    answer: int = 200

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.raw]


@contextmanager
def listening() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            kept.raw.append(self.rfile.read(length))
            self.send_response(kept.answer)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Server(f"http://127.0.0.1:{server.server_port}/secret-path")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()
