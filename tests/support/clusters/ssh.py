"""Servers of ssh on the nodes n1 and n2 of the Slurm cluster, and a key of the user that opens both."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from clusters.runs import ClusterRun
from clusters.slurm import Slurm

_SSHD = """Port 22
HostKey {base}/home/host_key
AuthorizedKeysFile {base}/home/.ssh/authorized_keys
PasswordAuthentication no
UsePAM no
StrictModes no
"""
_CLIENT = """IdentityFile {base}/home/.ssh/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""
_NODES = ("n1", "n2")


class SshRun(ClusterRun):
    launcher = "ssh"
    nodes = ("head", *_NODES)

    def of_job(self) -> Mapping[str, Any]:
        return {"hosts": list(_NODES)}

    def begin(self) -> subprocess.Popen[str]:
        path = f"PATH={self.cluster.base}/home/bin:/usr/bin:/bin"
        command = f"{path}:$PATH exec torchaos run {self.file} --out runs"
        started: subprocess.Popen[str] = self.cluster.popen("sh", "-c", command)
        return started


def missing() -> str:
    """What this machine lacks, or an empty text."""
    if shutil.which("sshd", path="/usr/sbin") is None:
        return "a server of ssh is needed: apt-get install openssh-server"
    return ""


@contextmanager
def served(cluster: Slurm) -> Iterator[Slurm]:
    """A context manager in which the user reaches both nodes by ssh."""
    home = cluster.base / "home"
    make = "mkdir -p .ssh bin && ssh-keygen -q -t ed25519 -N '' -f .ssh/key && cp .ssh/key.pub .ssh/authorized_keys"
    code, said = cluster.as_user("sh", "-c", f"cd {home} && {make}")
    assert code == 0, said
    (home / ".ssh" / "config").write_text(_CLIENT.format(base=cluster.base))
    (cluster.base / "sshd_config").write_text(_SSHD.format(base=cluster.base))
    ssh = home / "bin" / "ssh"  # a user's configuration: OpenSSH reads the home of the passwd file
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -o IdentitiesOnly=yes -F {home}/.ssh/config "$@"\n')
    ssh.chmod(0o755)
    cluster.as_root("head", "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{home}/host_key")
    for node in _NODES:
        cluster.as_root(node, "sh", "-c", f"mkdir -p /run/sshd && /usr/sbin/sshd -f {cluster.base}/sshd_config")
    yield cluster
    for node in _NODES:
        cluster.kill(node, ("sshd -f",))
