"""A network namespace for the test of one handle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import need

from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import Handle
from torchaos.harness.rollback.network_handles import (
    IPTABLES,
    QDISC_MARK,
    LinkUp,
    Names,
    NftTable,
    Qdisc,
    QueueRule,
    mark_of,
)

KINDS = {"nft_table": "nft", "link_up": "links", "qdisc": "tc", "queue_rule": "shaper", "names": "links"}
NEEDS = pytest.mark.needs("root", "links")


def case_of(kind: str, spawn: Any, tmp_path: Path) -> tuple[Handle, Callable[[], None]]:
    """The handle, and the change that it undoes. A test of it is marked with NEEDS."""
    need(KINDS[kind])
    namespace, mark = namespace_of(spawn), mark_of("a-fault")
    at = (namespace.pid, namespace.start_ticks)
    namespace.run(["ip", "link", "set", "lo", "up"])
    names = tmp_path / "hosts"
    names.write_text("10.0.0.1 node\n")

    def queue() -> None:
        namespace.run([*IPTABLES, "-N", mark])
        namespace.run([*IPTABLES, "-A", mark, "-j", "ACCEPT"])
        namespace.run([*IPTABLES, "-A", "OUTPUT", "-j", mark])

    tbf = ["tbf", "rate", "1mbit", "burst", "3200", "latency", "50ms"]
    cases: dict[str, tuple[Handle, Callable[[], Any]]] = {
        "nft_table": (NftTable(*at, "inet", mark), lambda: namespace.run(["nft", "add", "table", "inet", mark])),
        "link_up": (LinkUp(*at, "lo"), lambda: namespace.run(["ip", "link", "set", "lo", "down"])),
        "qdisc": (
            Qdisc(*at, "lo"),
            lambda: namespace.run(["tc", "qdisc", "add", "dev", "lo", "root", "handle", QDISC_MARK, *tbf]),
        ),
        "queue_rule": (QueueRule(*at, mark), queue),
        "names": (Names(*at, str(names), "10.0.0.1 node\n"), lambda: names.write_text("")),
    }
    handle, change = cases[kind]
    return handle, change


def namespace_of(spawn: Any) -> NetworkNamespace:
    """The namespace of a process that only keeps it."""
    process = spawn("unshare", "--net", "sleep", "600", start_new_session=True)
    end = time.monotonic() + 20
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        assert time.monotonic() < end, "unshare did not make a namespace"
        time.sleep(0.005)
    return NetworkNamespace.of(process.pid)
