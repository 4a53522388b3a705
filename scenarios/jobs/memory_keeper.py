"""Runs a command on a node, and until it ends keeps in its own memory what the ranks of the job copy to it:
memory_keeper.py COMMAND... Plain Python; copy it.

A rank that is killed takes no copy with it. A node that dies takes those copies with it that no other node has. The
ranks find this process by MEMORY_KEEPER, its port. Whoever reaches the port can read and replace the copies: only for
networks that the job trusts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT, KEPT, TIMEOUT_S = "MEMORY_KEEPER", 3, 30.0


@dataclass(frozen=True)
class Keeper:
    """The keeper of a node, as ranks on any node see it. Each call raises OSError if it does not answer."""

    host: str
    port: int

    def put(self, step: int, rank: int, data: bytes) -> None:
        """Keep a rank's part of the state after a step, and those of the KEPT - 1 steps before it. A part that was not
        sent completely is not kept."""
        self._ask({"do": "put", "step": step, "rank": rank, "size": len(data)}, data)

    def parts(self) -> list[tuple[int, int]]:
        """The step and rank of each part that is here."""
        return [(step, rank) for step, rank in json.loads(self._ask({"do": "list"}))]

    def get(self, step: int, rank: int) -> bytes:
        return self._ask({"do": "get", "step": step, "rank": rank})

    def forget_after(self, step: int) -> None:
        """Forget all later steps: they will be done again."""
        self._ask({"do": "forget", "step": step})

    def _ask(self, what: dict[str, Any], data: bytes = b"") -> bytes:
        with socket.create_connection((self.host, self.port), TIMEOUT_S) as keeper:
            keeper.sendall(json.dumps(what).encode() + b"\n" + data)
            with keeper.makefile("rb") as answer:
                size = int(answer.readline() or -1)
                found = answer.read(size) if size >= 0 else b""
        if size != len(found):
            raise ConnectionError(f"the memory keeper at {self.host} ended in the middle of an answer")
        return found


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("", 0), Request)
        self.kept: dict[tuple[int, int], bytes] = {}  # by step and rank
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, asked: dict[str, Any], data: bytes) -> bytes | None:
        """None: there is no such part."""
        step, rank = asked.get("step", 0), asked.get("rank", 0)
        with self.lock:
            if asked["do"] == "put":
                self.kept[step, rank] = data
                for old in sorted(one for one, of in self.kept if of == rank)[:-KEPT]:
                    del self.kept[old, rank]
            elif asked["do"] == "get":
                return self.kept.get((step, rank))
            elif asked["do"] == "forget":
                self.kept = {key: one for key, one in self.kept.items() if key[0] <= step}
            return json.dumps(list(self.kept)).encode()


class Request(socketserver.StreamRequestHandler):
    server: Server
    timeout = TIMEOUT_S

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        data = self.rfile.read(asked.get("size", 0))
        answer = self.server.answer(asked, data) if len(data) == asked.get("size", 0) else None
        if answer is not None:
            self.wfile.write(b"%d\n" % len(answer) + answer)


def main(command: list[str]) -> int:
    beside = Path(sys.executable).parent / command[0]  # torchrun, where this environment is not on the PATH
    program = command[0] if shutil.which(command[0]) or not beside.exists() else str(beside)
    port = Server().server_address[1]
    job = subprocess.Popen([program, *command[1:]], env={**os.environ, PORT: str(port)})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: job.send_signal(signum))
    code = job.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
