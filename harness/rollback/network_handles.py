"""The handles that undo changes to a network. Links, packet rules and queues are in a network namespace of the run and
have the mark of torchaos; if the namespace is gone, the change is gone, too. `Toxic` is the change of a proxy in a
Toxiproxy server: toxics with the fault's mark, or a disabled proxy."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.host.toxiproxy import Api
from torchaos.harness.rollback.file_handles import Touches

QDISC_MARK = "ca05:"  # the handle (in tc's sense) of a root qdisc that torchaos made
_OURS = re.compile(r"torchaos_[a-z0-9_]{1,19}")


@dataclass(frozen=True)
class _InNetworkNamespace:
    pid: int  # the process that keeps the namespace
    start_ticks: int

    @property
    def namespace(self) -> NetworkNamespace:
        return NetworkNamespace(self.pid, self.start_ticks)

    def touches(self) -> Touches:
        return Touches(network=self.namespace)

    def undo(self) -> None:
        """Undoes the change. Tries four times, because a tool that the dead harness had just started may interfere."""
        for again in (True, True, True, False):
            try:
                if self.namespace.alive() and not self._is_good():
                    self._undo_change()
                return
            except OSError:
                if not again and self.namespace.alive():
                    raise
                time.sleep(0.1)

    def is_undone(self) -> bool:
        return not self.namespace.alive() or self._is_good()

    def _is_good(self) -> bool:
        raise NotImplementedError

    def _undo_change(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class NftTable(_InNetworkNamespace):
    """A table of nftables that torchaos made. Undo deletes it."""

    kind: ClassVar[str] = "nft_table"
    family: str
    table: str

    def __post_init__(self) -> None:
        _check_ours(self.table)

    def _is_good(self) -> bool:
        listed = json.loads(self.namespace.run(["nft", "-j", "list", "tables"]))["nftables"]
        tables = [item["table"] for item in listed if "table" in item]
        return not any((table["family"], table["name"]) == (self.family, self.table) for table in tables)

    def _undo_change(self) -> None:
        self.namespace.run(["nft", "delete", "table", self.family, self.table])


@dataclass(frozen=True)
class LinkUp(_InNetworkNamespace):
    """A network device that was up. Undo sets it up again."""

    kind: ClassVar[str] = "link_up"
    device: str

    def _is_good(self) -> bool:
        shown = json.loads(self.namespace.run(["ip", "-j", "link", "show", "dev", self.device]))
        return "UP" in shown[0]["flags"]

    def _undo_change(self) -> None:
        self.namespace.run(["ip", "link", "set", "dev", self.device, "up"])


@dataclass(frozen=True)
class Qdisc(_InNetworkNamespace):
    """The root qdisc of a device, made by torchaos. Undo deletes it if it has the mark; the kernel then sets the
    default again."""

    kind: ClassVar[str] = "qdisc"
    device: str

    def _is_good(self) -> bool:
        shown = json.loads(self.namespace.run(["tc", "-j", "qdisc", "show", "dev", self.device]))
        return not any(qdisc.get("root") and qdisc["handle"] == QDISC_MARK for qdisc in shown)

    def _undo_change(self) -> None:
        self.namespace.run(["tc", "qdisc", "del", "dev", self.device, "root"])


@dataclass(frozen=True)
class QueueRule(_InNetworkNamespace):
    """The chain that torchaos made to send packets to a packet queue, and the rule that jumps to it. The queue itself
    is a process, with a handle of its own."""

    kind: ClassVar[str] = "queue_rule"
    chain: str

    def __post_init__(self) -> None:
        _check_ours(self.chain)

    def _is_good(self) -> bool:
        return not any(self.chain in line.split() for line in self._rules())

    def _undo_change(self) -> None:
        jump = ["OUTPUT", "-j", self.chain]
        while any(line.split() == ["-A", *jump] for line in self._rules()):
            self.namespace.run([*IPTABLES, "-D", *jump])
        self.namespace.run([*IPTABLES, "-F", self.chain])
        self.namespace.run([*IPTABLES, "-X", self.chain])

    def _rules(self) -> Sequence[str]:
        return self.namespace.run([*IPTABLES, "-S"]).splitlines()


IPTABLES = ("iptables-legacy", "-w", "5")


@dataclass(frozen=True)
class Names(_InNetworkNamespace):
    """The file with the names of a run's nodes. Undo writes the earlier text into the same file, because the nodes have
    it mounted."""

    kind: ClassVar[str] = "names"
    path: str
    text: str

    def touches(self) -> Touches:
        return Touches(network=self.namespace, path=self.path, own=self.path)

    def _is_good(self) -> bool:
        try:
            return Path(self.path).read_text() == self.text
        except FileNotFoundError:  # the file was removed together with its run
            return True

    def _undo_change(self) -> None:
        with open(self.path, "r+") as file:
            file.truncate()
            file.write(self.text)


def mark_of(fault: str) -> str:
    """The name of the table or chain that a fault makes, at most 28 characters. The name shows that torchaos made
    it."""
    return f"torchaos_{re.sub('[^a-z0-9]', '_', fault)[-10:]}_{zlib.crc32(fault.encode()):08x}"


def _check_ours(name: str) -> None:
    if not _OURS.fullmatch(name):
        raise ValueError(f"{name!r} does not have the mark of torchaos, so it is not removed")


@dataclass(frozen=True)
class Toxic:
    """A change to a proxy. `pid`, `start_ticks` and `port` identify the server (see host/toxiproxy.py). If the server
    is gone, the change is gone, too. `mark`: the beginning of the names of the fault's toxics. `down`: the fault
    disabled the proxy, so undo enables it."""

    kind: ClassVar[str] = "toxic"
    pid: int
    start_ticks: int
    port: int
    proxy: str
    mark: str
    down: bool = False

    def __post_init__(self) -> None:
        if not self.mark.startswith("torchaos_"):
            raise ValueError(f"{self.mark!r} is not a mark of torchaos, so these toxics are not removed")

    def touches(self) -> Touches:
        return Touches(marked=self.mark)

    @property
    def _api(self) -> Api:
        return Api(self.pid, self.start_ticks, self.port)

    def undo(self) -> None:
        """Removes the toxics, and enables the proxy if the fault disabled it. Tries three times, because a last request
        of the dead harness may arrive in between. Raises OSError if the server refuses or does not answer."""
        for _again in range(3):
            if self.is_undone():
                return
            with suppress(ProcessLookupError):
                self._api.ask(proxy=self.proxy, remove=self.mark, **({"enabled": True} if self.down else {}))

    def is_undone(self) -> bool:
        if not self._api.alive():
            return True
        try:
            proxy = self._api.ask().get(self.proxy)
        except ProcessLookupError:
            return True
        if proxy is None:
            return True
        return not any(name.startswith(self.mark) for name in proxy["toxics"]) and (proxy["enabled"] or not self.down)
