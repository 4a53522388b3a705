"""A stand-in for toxiproxy-server, for machines that have none: toxiproxy-server -host HOST -port PORT -config FILE.

It has those parts of Toxiproxy's HTTP interface that the harness uses, and its toxics with their units, as its README
describes them. All toxics act on real connections."""

from __future__ import annotations

import argparse
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_TICK_S = 0.02


@dataclass
class Proxy:
    name: str
    listen: str
    upstream: str
    enabled: bool = False
    toxics: dict[str, dict[str, Any]] = field(default_factory=dict)
    listener: socket.socket | None = None
    pairs: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)

    def of(self, stream: str, kind: str) -> dict[str, Any] | None:
        """The attributes of a toxic, with the time at which it was added."""
        return next((one for one in [*self.toxics.values()] if (one["stream"], one["type"]) == (stream, kind)), None)

    def enable(self, enabled: bool) -> None:
        if enabled and not self.enabled:
            host, _, port = self.listen.rpartition(":")
            self.listener = socket.create_server((host, int(port)))
            threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()
        elif not enabled and self.listener:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            for pair in self.pairs:
                for one in pair:
                    end(one)
            self.pairs.clear()
        self.enabled = enabled

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            host, _, port = self.upstream.rpartition(":")
            try:
                server = socket.create_connection((host, int(port)), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.pairs.append((client, server))
            for stream, source, target in (("upstream", client, server), ("downstream", server, client)):
                threading.Thread(target=Link(self, stream, source, target).run, daemon=True).start()


def end(one: socket.socket, reset: bool = False) -> None:
    with suppress(OSError):
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            one.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        one.close()


@dataclass
class Link:
    """One direction of a connection."""

    proxy: Proxy
    stream: str
    source: socket.socket
    target: socket.socket
    begun_s: float = field(default_factory=time.monotonic)
    limited: int = 0  # bytes that were passed on under limit_data

    def run(self) -> None:
        chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(64)
        threading.Thread(target=self._read, args=(chunks,), daemon=True).start()
        while True:
            if self._breaks():
                return
            try:
                came_s, data = chunks.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if not data:
                if slow := self.proxy.of(self.stream, "slow_close"):
                    time.sleep(slow["attributes"]["delay"] / 1e3)
                end(self.target)  # the other link then gets the end of its source
                return
            for piece in self._pieces(came_s, data):
                if self.proxy.of(self.stream, "timeout"):
                    continue  # the data is lost
                try:
                    self.target.sendall(piece)
                except OSError:
                    break
                self.limited += len(piece) if self.proxy.of(self.stream, "limit_data") else 0

    def _read(self, chunks: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            try:
                data = self.source.recv(1 << 15)
            except OSError:
                data = b""
            chunks.put((time.monotonic(), data))
            if not data:
                return

    def _pieces(self, came_s: float, data: bytes) -> Iterator[bytes]:
        if late := self.proxy.of(self.stream, "latency"):
            time.sleep(max(0.0, came_s + late["attributes"]["latency"] / 1e3 - time.monotonic()))
        if limit := self.proxy.of(self.stream, "limit_data"):
            data = data[: max(0, limit["attributes"]["bytes"] - self.limited)]
        slicer, slow = self.proxy.of(self.stream, "slicer"), self.proxy.of(self.stream, "bandwidth")
        size = slicer["attributes"]["average_size"] if slicer else len(data)
        if slow:
            size = min(size, max(1, slow["attributes"]["rate"] * 100))  # a tenth of a second
        for at in range(0, len(data), max(1, size)):
            piece = data[at : at + size]
            if slow:
                time.sleep(len(piece) / (1e3 * slow["attributes"]["rate"]))
            yield piece
            if slicer:
                time.sleep(slicer["attributes"]["delay"] / 1e6)

    def _breaks(self) -> bool:
        """Ends the connection if a toxic says so."""
        for kind in ("timeout", "reset_peer"):
            toxic = self.proxy.of(self.stream, kind)
            after_s = toxic["attributes"]["timeout"] / 1e3 if toxic else 0.0
            due = toxic and time.monotonic() >= max(self.begun_s, toxic["since_s"]) + after_s
            if due and (after_s or kind == "reset_peer"):
                for one in (self.target, self.source):
                    end(one, reset=kind == "reset_peer")
                return True
        limit = self.proxy.of(self.stream, "limit_data")
        if limit and self.limited >= limit["attributes"]["bytes"]:
            end(self.target)
            end(self.source)
            return True
        return False


class Handler(BaseHTTPRequestHandler):
    proxies: dict[str, Proxy]

    def do_GET(self) -> None:
        self._do("GET")

    def do_POST(self) -> None:
        self._do("POST")

    def do_DELETE(self) -> None:
        self._do("DELETE")

    def _do(self, method: str) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        words = self.path.strip("/").split("/")
        if method == "GET" and words == ["proxies"]:
            return self._answer({name: self._shown(one) for name, one in self.proxies.items()})
        proxy = self.proxies.get(words[1]) if len(words) > 1 else None
        if proxy is None:
            return self._answer({"error": "proxy not found"}, 404)
        if words[2:] == ["toxics"]:
            if method == "POST":
                proxy.toxics[body["name"]] = {**body, "since_s": time.monotonic()}
                return self._answer(body)
            return self._answer([self._toxic(one) for one in proxy.toxics.values()])
        if words[2:3] == ["toxics"] and method == "DELETE":
            proxy.toxics.pop(words[3], None)
            return self._answer(None, 204)
        if method == "POST" and "enabled" in body:
            proxy.enable(bool(body["enabled"]))
        return self._answer(self._shown(proxy))

    def _toxic(self, one: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in one.items() if name != "since_s"}

    def _shown(self, one: Proxy) -> dict[str, Any]:
        shown = {"name": one.name, "listen": one.listen, "upstream": one.upstream, "enabled": one.enabled}
        return {**shown, "toxics": [self._toxic(toxic) for toxic in one.toxics.values()]}

    def _answer(self, answer: object, code: int = 200) -> None:
        raw = b"" if code == 204 else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_words: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "config"):
        parser.add_argument(f"-{name}", required=True)
    options = parser.parse_args()
    with open(options.config) as file:
        proxies = [Proxy(one["name"], one["listen"], one["upstream"]) for one in json.load(file)]
    for proxy in proxies:
        proxy.enable(True)
    Handler.proxies = {proxy.name: proxy for proxy in proxies}
    ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
