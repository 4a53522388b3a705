"""What is watched while a network fault is on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from torchaos.harness.contracts import Site
from torchaos.harness.network.cut import Cut, counts
from torchaos.harness.network.link import Link, link_of
from torchaos.harness.network.sampling import Counts, Watch, at_least, round_trips
from torchaos.harness.undo.network import NftTable


def drops(site: Site, cut: Cut) -> Sequence[Watch]:
    """The job's own packets that a cut has dropped; known by the counters of the rules that drop them."""
    proof = at_least("dropped", 1, "the first packet of the job was dropped ({n} by now)")
    return [Watch(site.fault, _links(site), proof, [partial(counts, cut.handle)])]


def resent(site: Site) -> Sequence[Watch]:
    return [Watch(site.fault, _links(site), at_least("resent", 1, "the job sent {n} segments again"))]


def came(site: Site, name: str, words: str) -> Sequence[Watch]:
    """What the kernels of the nodes count of segments that came in."""
    return [Watch(site.fault, _links(site), at_least(name, 1, words))]


def slower(site: Site, least_ms: float) -> Sequence[Watch]:
    """The round trips on the connections of each target node."""
    proof = at_least("rtt_ms", least_ms, "the round trip on the job's connections is {n} ms")
    links = [link_of(live) for live in site.nodes]
    return [Watch(site.fault, _links(site), proof, [partial(_longest, links)], period_s=0.25)]


def limited(site: Site) -> Sequence[Watch]:
    """The packets that had to wait for a rate limit."""
    proof = at_least("overlimits", 1, "{n} packets of the job had to wait for the rate limit")
    links = [link_of(live) for live in site.nodes]
    return [Watch(site.fault, _links(site), proof, [partial(_overlimits, links)], period_s=0.25)]


def _links(site: Site) -> list[Link]:
    return [link_of(live) for live in site.cluster]


def _longest(links: Sequence[Link]) -> Counts:
    found = [trips["rtt_ms"] for trips in map(round_trips, links) if trips]
    return {"rtt_ms": max(found)} if found else {}


def _overlimits(links: Sequence[Link]) -> Counts:
    total = 0
    for link in links:
        try:
            shown = json.loads(link.space.run(["tc", "-s", "-j", "qdisc", "show", "dev", link.device]))
        except OSError:
            continue
        total += sum(one.get("overlimits", 0) for one in shown if one.get("kind") == "tbf")
    return {"overlimits": total}


def refusals(site: Site, tables: Sequence[NftTable]) -> Sequence[Watch]:
    """The connections that rules of these tables refused."""
    proof = at_least("refused", 1, "{n} connections of the job were refused")
    return [Watch(site.fault, _links(site), proof, [partial(_refused, tables)])]


def _refused(tables: Sequence[NftTable]) -> Counts:
    return {"refused": sum(counts(table).get("refused", 0) for table in tables)}
