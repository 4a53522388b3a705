"""The probes of network faults."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial

from torchaos.harness.contracts import NodeSite
from torchaos.harness.mechanics.network.cut import Cut, counts
from torchaos.harness.mechanics.network.link import Link, link_of
from torchaos.harness.mechanics.network.sampling import Counts, Watch, at_least, round_trips
from torchaos.harness.undo.network import NftTable


def drops(site: NodeSite, cut: Cut) -> Sequence[Watch]:
    """A probe that counts the job's own packets that a cut has dropped, from the counters of the rules that drop
    them."""
    proof = at_least("dropped", 1, "the first packet of the job was dropped ({n} by now)")
    return [Watch(site.fault, _links(site), proof, [partial(counts, *cut.handles)])]


def resent(site: NodeSite) -> Sequence[Watch]:
    return [Watch(site.fault, _links(site), at_least("resent", 1, "the job sent {n} segments again"))]


def came(site: NodeSite, name: str, words: str) -> Sequence[Watch]:
    """A probe that counts segments that arrived, from the counter `name` of the nodes' kernels."""
    return [Watch(site.fault, _links(site), at_least(name, 1, words))]


def slower(site: NodeSite, least_ms: float) -> Sequence[Watch]:
    """A probe that measures the round trips on the connections of each target node."""
    proof = at_least("rtt_ms", least_ms, "the round trip on the job's connections is {n} ms")
    links, every = [link_of(live) for live in site.nodes], _links(site)
    return [Watch(site.fault, every, proof, [partial(_longest, links, every)], period_s=0.25)]


def limited(site: NodeSite) -> Sequence[Watch]:
    """A probe that counts the packets that had to wait for a rate limit, and measures the rate at which packets got
    through."""
    proof = at_least("overlimits", 1, "{n} packets of the job had to wait for the rate limit")
    links = [link_of(live) for live in site.nodes]
    return [Watch(site.fault, _links(site), proof, [_Limiter(links)], period_s=0.25)]


def _links(site: NodeSite) -> list[Link]:
    return [link_of(live) for live in site.cluster]


def _longest(links: Sequence[Link], every: Sequence[Link]) -> Counts:
    peers = {link: [other.address for other in every if other != link] for link in links}
    times = [trips["rtt_ms"] for link in links if (trips := round_trips(link, peers[link]))]
    return {"rtt_ms": max(times)} if times else {}


class _Limiter:
    """The counters of the token buckets. The rate is the job's highest rate between two samples while packets were
    waiting. At other times the job may not have used the whole rate."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._last: dict[str, tuple[float, int, bool]] = {}  # by link: time, bytes sent, whether packets wait
        self._rates: list[float] = []  # Mbit/s

    def __call__(self) -> Counts:
        total = 0
        for link in self._links:
            try:
                shown = json.loads(link.space.run(["tc", "-s", "-j", "qdisc", "show", "dev", link.device]))
            except OSError:
                continue
            for qdisc in (qdisc for qdisc in shown if qdisc.get("kind") == "tbf"):
                total += qdisc.get("overlimits", 0)
                now = time.monotonic(), qdisc.get("bytes", 0), qdisc.get("backlog", 0) > 0
                before = self._last.get(link.name)
                if before and before[2] and now[2]:
                    self._rates.append(8e-6 * (now[1] - before[1]) / (now[0] - before[0]))
                self._last[link.name] = now
        return {"overlimits": total, **({"rate_mbit": round(max(self._rates), 3)} if self._rates else {})}


def refusals(site: NodeSite, tables: Sequence[NftTable]) -> Sequence[Watch]:
    """A probe that counts the connections that the rules of these tables refused."""
    proof = at_least("refused", 1, "{n} connections of the job were refused")
    return [Watch(site.fault, _links(site), proof, [partial(_refused, tables)])]


def _refused(tables: Sequence[NftTable]) -> Counts:
    return {"refused": sum(counts(table).get("refused", 0) for table in tables)}
