"""Machines without a scheduler, reached by ssh with the user's keys and configuration. The run directory must be on a
file system that all machines share, and torchaos must be installed at the same path on all of them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from torchaos.harness.host.cluster_tools import last_words
from torchaos.harness.interfaces import Capability, Handle, JobSpec, Node, RemoteLauncher, UsageError
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.record.plan import counted
from torchaos.harness.rollback.handles import JobProcesses

_ANSWER_S = 60.0
_NO_CONNECTION = 255  # ssh(1): "or with 255 if an error occurred"
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-T")


@dataclass(frozen=True)
class SshNode:
    index: int
    host: str
    env: Mapping[str, str] = field(default_factory=dict)
    link: ClassVar[None] = None

    def argv(self, command: Sequence[str]) -> list[str]:
        return ["ssh", *_OPTIONS, self.host, shlex.join(command)]

    def host_pid(self, pid: int) -> int | None:
        return None


def _problem(node: SshNode, cwd: Path) -> str:
    """Why the command can't be started on the machine. Empty if it can."""
    try:
        done = subprocess.run(
            node.argv(["test", "-d", str(cwd)]), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it has not answered for {_ANSWER_S:g} s"
    if done.returncode == _NO_CONNECTION:
        return last_words("ssh", done.stderr, done.returncode)
    return f"it has no folder {cwd}" if done.returncode else ""


@dataclass
class Ssh(RemoteLauncher):
    """Each node is a machine of `job.hosts`, reached by ssh. The first machine serves the rendezvous, so all others
    must reach it by that name."""

    hosts: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]*$")]],
        Field(description="For launcher: ssh: the names of the machines, by which all of them reach the first."),
    ] = field(default_factory=list)  # fmt: skip

    name: ClassVar[str] = "ssh"
    needs: ClassVar[frozenset[str]] = frozenset({"ssh"})
    checks: ClassVar[Mapping[str, Capability]] = {
        "ssh": Capability(
            "nodes that are reached by ssh", lambda: shutil.which("ssh"), "apt-get install openssh-client"
        ),
    }
    sets_rendezvous: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "links": "the network of another machine is not touched; write launcher: netns",
        "docker": "the nodes are no containers; write launcher: docker",
        "endpoints": "the nodes do not reach a proxy of the harness's; write launcher: local or netns",
        "node.reboot": "the command on a node is started only once; write node.freeze or node.kill",
    }

    @property
    def node_count(self) -> int | None:
        return len(self.hosts) or None

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return (JobProcesses(spec.env[ENV_RUN_ID]),)  # the ssh clients on this machine

    def create(self, spec: JobSpec) -> Sequence[SshNode]:
        """The nodes. Raises UsageError if `job.hosts` has too few or too many of them, or if one can't be
        reached, before anything is started on the others."""
        if len(self.hosts) != spec.nodes:
            raise UsageError(f"launcher: ssh needs {counted(spec.nodes, 'name')} in job.hosts, one for each node")
        nodes = [SshNode(index, host) for index, host in enumerate(sorted(self.hosts))]
        for node in nodes:
            if problem := _problem(node, spec.cwd):
                raise UsageError(f"{node.host} can't be a node: {problem}")
        return nodes

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        hosts = ",".join(node.host for node in nodes if isinstance(node, SshNode))
        env = [f"{name}={value}" for name, value in spec.own_env.items()]
        there = ["env", "-C", str(spec.cwd), *env, *wrapper, "--hosts", hosts]
        return [node.argv([*there, "--node", str(node.index), "--", *spec.argv]) for node in nodes]
