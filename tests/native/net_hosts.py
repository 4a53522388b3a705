"""Two processes of net_host.c, which play the part of NCCL, and orders for the plug-in in each of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waiting import wait_until

from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.nccl_connections import ENV_NCCL_NET, HITS, NetOrder, NetPage

LIMIT_S = 120.0


class Fault:
    """One order in one host, with its control page."""

    def __init__(self, page: NetPage, slot: int, control: ControlPage) -> None:
        self._page, self._slot, self._control = page, slot, control

    def read(self, word: int) -> int:
        return self._page.read(word, self._slot)

    @property
    def hits(self) -> int:
        return self.read(HITS)

    def wait_for_a_hit(self) -> None:
        wait_until(lambda: self.hits)

    def take_back(self) -> None:
        self._control.write(ControlPage.GO, 1)


class Host:
    """One process: `rank` 0 or 1, with the plug-in's interface `version`; of several, "12,11", the first it has."""

    def __init__(
        self, program: Path, library: Path, folder: Path, *, rank: int, version: int | str, channels: int,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._rest, self._orders = folder, b"", 0
        ours = {"NCCL_SOCKET_IFNAME": "=lo", ENV_NCCL_NET: str(folder), "RANK": str(rank)}
        self.process = subprocess.Popen(
            [str(program), str(library), str(version), str(channels)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **ours, **(env or {})},
        )  # fmt: skip
        self.page = NetPage(folder / f"p{self.process.pid}.net")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, limit_s: float = LIMIT_S) -> str:
        """The next line. Raises TimeoutError if none comes in time, and EOFError if the process is gone."""
        assert self.process.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            if not select.select([self.process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"nothing was heard for {limit_s} s")
            got = os.read(self.process.stdout.fileno(), 65536)
            if not got:
                raise EOFError
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def result(self) -> dict[int, str]:
        """What an exchange came to, by channel: `ok 100`, `wrong ...` or `error 6`, in the order of their ends."""
        lines = list(self.lines())
        return {int(line.split()[1]): line.split(maxsplit=2)[2] for line in lines}

    def lines(self) -> Iterator[str]:
        while (line := self.hear()).startswith("channel"):
            yield line
        assert line.startswith("exchanged"), line

    def order(self, order: NetOrder, lease_s: float = 600.0) -> Fault:
        self._orders += 1
        path = self._folder / f"{self.process.pid}-{self._orders}.page"
        control = ControlPage(path, create=True)
        control.write(ControlPage.FIRED, 1)
        return Fault(self.page, self.page.order(order, str(path), 1, lease_s), control)

    def end(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


class Pair:
    """Rank 0 and rank 1."""

    def __init__(
        self, program: Path, library: Path, folder: Path, version: int | str = 11, channels: int = 3, **env: str
    ):
        make: Any = {"version": version, "channels": channels, "env": env}
        self.hosts = [Host(program, library, folder, rank=rank, **make) for rank in (0, 1)]

    def swap_handles(self) -> None:
        """Each host gets the other's handles, and begins to connect."""
        handles = [host.ask("listen").removeprefix("handles ") for host in self.hosts]
        for host, theirs in zip(self.hosts, reversed(handles), strict=True):
            host.say(f"connect {theirs}")

    def connect(self) -> None:
        self.swap_handles()
        assert [host.hear() for host in self.hosts] == ["connected"] * 2

    def exchange(self, sizes: list[int], count: int = 4, depth: int = 2, seed: int = 1) -> None:
        for host in self.hosts:
            host.say(f"exchange {seed} {count} {depth} {' '.join(map(str, sizes))}")

    def results(self) -> list[dict[int, str]]:
        return [host.result() for host in self.hosts]

    def end(self) -> None:
        for host in self.hosts:
            host.end()
