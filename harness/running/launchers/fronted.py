"""Wraps a launcher, and puts proxies in front of the job's endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.contracts import Handle, JobSpec, Launcher, Node
from torchaos.harness.mechanics.network.link import Link
from torchaos.harness.mechanics.proxy.server import Endpoint, mark_of_server, start
from torchaos.harness.scenario.placeholders import ENDPOINT
from torchaos.harness.undo.handles import JobProcesses

RENDEZVOUS = "rendezvous"
_RENDEZVOUS_ENV = "PET_RDZV_ENDPOINT"


@dataclass(frozen=True)
class FrontedNode:
    """A node that replaces `{endpoint.NAME}` in the command and the environment by the address that the job must
    use."""

    inner: Node
    env: Mapping[str, str]
    addresses: Mapping[str, str]  # by name

    @property
    def index(self) -> int:
        return self.inner.index

    @property
    def link(self) -> Link | None:
        return self.inner.link

    def argv(self, command: Sequence[str]) -> list[str]:
        return self.inner.argv([filled(word, self.addresses) for word in command])

    def host_pid(self, pid: int) -> int | None:
        return self.inner.host_pid(pid)


class Fronted(Launcher):
    """A launcher with proxies. `upstreams`: the job's endpoints by name. `proxied`: the endpoints that get a proxy
    because a fault hits them. The job uses the others directly."""

    name: ClassVar[str]  # empty, because no scenario names it

    def __init__(self, inner: Launcher, upstreams: Mapping[str, str], proxied: set[str], folder: Path) -> None:
        self._inner, self._upstreams, self._folder = inner, upstreams, folder
        self._proxied = {name: upstreams[name] for name in sorted(proxied)}
        self.endpoints: dict[str, Endpoint] = {}

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        servers = [JobProcesses(mark_of_server(spec.env[ENV_RUN_ID]))] if self._proxied else []
        return [*self._inner.resources(spec), *servers]

    def create(self, spec: JobSpec) -> Sequence[Node]:
        """Creates the nodes, and starts one server for all submissions. Raises ChaosError."""
        nodes = self._inner.create(spec)
        lives = self.endpoints and all(endpoint.api.alive() for endpoint in self.endpoints.values())
        if self._proxied and not lives:
            self.endpoints = start(self._proxied, spec.env[ENV_RUN_ID], self._folder, nodes[0].link)
        return [self._fronted(node, spec) for node in nodes]

    def _fronted(self, node: Node, spec: JobSpec) -> FrontedNode:
        addresses = {**self._upstreams, **{name: endpoint.listen for name, endpoint in self.endpoints.items()}}
        if node.index == 0 and RENDEZVOUS in addresses:  # the first node serves the rendezvous itself
            addresses[RENDEZVOUS] = self._upstreams[RENDEZVOUS]
        env = {**{name: value for name, value in spec.env.items() if ENDPOINT in value}, **node.env}
        if RENDEZVOUS in addresses and env.get(_RENDEZVOUS_ENV) == self._upstreams[RENDEZVOUS]:
            env[_RENDEZVOUS_ENV] = addresses[RENDEZVOUS]
        return FrontedNode(node, {name: filled(value, addresses) for name, value in env.items()}, addresses)


def filled(text: str, addresses: Mapping[str, str]) -> str:
    for name, address in addresses.items():
        text = text.replace(f"{{{ENDPOINT}{name}}}", address)
    return text
