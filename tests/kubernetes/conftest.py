"""A real Kubernetes of two nodes, each a set of namespaces of this machine: see cluster.sh."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import wait_until

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_SCRIPT = _HERE / "cluster.sh"
_SYSTEM = ("unshare", "nsenter", "ip", "openssl", "iptables")
NODES = 2
USER = "chaos"


def programs() -> Path:
    """The folder in which ci/kubernetes/build keeps the programs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCHAOS_KUBERNETES") or cache / "torchaos" / "kubernetes")


@dataclass
class Cluster:
    base: Path

    @property
    def shared(self) -> Path:
        """A folder that the nodes share. A pod sees it only if its manifest says so."""
        return self.base / "shared"

    def argv(self, *words: str) -> list[str]:
        return [str(_SCRIPT), str(self.base), *words]

    def popen(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command beside the API server, with the rights of the user `chaos`."""
        path = f"{Path(sys.executable).parent}:{self.base}/programs/bin:{os.environ['PATH']}"
        own = {
            "PATH": path,
            "KUBECONFIG": f"{self.base}/etc/{USER}",
            "OMP_NUM_THREADS": "1",
            "HOME": f"{self.base}/home",
        }
        env = ["env", "-u", "XDG_CACHE_HOME", "-u", "XDG_STATE_HOME", "-C", str(self.shared)]
        return subprocess.Popen(
            self.argv("in", "cp", *env, *(f"{name}={value}" for name, value in own.items()), *command),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def as_user(self, *command: str, timeout_s: float = 170.0) -> tuple[int, str]:
        process = self.popen(*command)
        said = process.communicate(timeout=timeout_s)[0]
        return process.returncode, said

    def as_root(self, node: str, *command: str, given: str = "") -> str:
        """The output of a command that is run on a node by root, who may do everything in the cluster too."""
        done = subprocess.run(
            self.argv("in", node, *command), input=given, capture_output=True, text=True, check=False, timeout=120
        )  # fmt: skip
        return done.stdout

    def kubectl(self, *words: str, given: str = "") -> str:
        return self.as_root("cp", "kubectl", *words, given=given)

    def objects(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", *words, "--output=json"))["items"]
        return found

    def pids(self, node: str, *words: str) -> list[int]:
        """The processes on a node whose command line has all these words, by their pids there."""
        lines = self.as_root(node, "ps", "-ww", "-eo", "pid=,stat=,args=").splitlines()
        living = [line.split(None, 2) for line in lines]
        whole = [one for one in living if len(one) == 3 and "Z" not in one[1]]
        return [int(one[0]) for one in whole if all(word in one[2] for word in words)]

    def outer_pids(self, node: str, run: str, inner: Sequence[int]) -> list[int]:
        """The pids on the node of processes of a run, given by their pids in its pod."""
        found = []
        for line in self.as_root(node, "sh", "-c", "grep -H ^NSpid: /proc/[0-9]*/status").splitlines():
            numbers = [int(number) for number in line.rpartition(":")[2].split()]
            if len(numbers) == 2 and numbers[1] in inner:
                environ = self.as_root(node, "cat", f"/proc/{numbers[0]}/environ")
                found += [numbers[0]] if f"{run}-s0" in environ else []
        return found

    def state(self, node: str, pid: int) -> str:
        return self.as_root(node, "ps", "-o", "stat=", "-p", str(pid)).strip()

    def pods(self, name: str, *, share: Sequence[Path] = (), more: Mapping[str, Any] | None = None) -> list[Any]:
        """Two pods, one on each node, that have this machine's programs and Python. `share`: folders that the pods see
        at the same path as torchaos. `more`: more of their spec."""
        site = Path(importlib.util.find_spec("yaml").origin or "").resolve().parents[1]  # type: ignore[union-attr]
        torch = Path(importlib.util.find_spec("torch").origin or "").resolve().parents[1]  # type: ignore[union-attr]
        here = [Path(path).resolve() for path in (sys.base_prefix, sys.prefix, _ROOT)]
        read = dict.fromkeys([*map(Path, ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")), *here, site, torch])
        paths = {**dict.fromkeys(read, True), **dict.fromkeys(share, False)}
        volumes = [{"name": f"v{n}", "hostPath": {"path": str(path)}} for n, path in enumerate(paths)]
        mounts = [
            {"name": f"v{n}", "mountPath": str(path), "readOnly": only} for n, (path, only) in enumerate(paths.items())
        ]
        env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin", "OMP_NUM_THREADS": "1"}
        container = {
            "name": "trainer", "image": "local/tiny:1", "imagePullPolicy": "Never", "command": ["sleep", "1000"],
            "volumeMounts": mounts, "env": [{"name": key, "value": value} for key, value in env.items()],
        }  # fmt: skip
        spec = {
            "automountServiceAccountToken": False, "enableServiceLinks": False, "terminationGracePeriodSeconds": 10,
            "dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}, "volumes": volumes,
            **(more or {}), "containers": [container, *(more or {}).get("containers", [])],
        }  # fmt: skip
        return [
            {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-{number}"},
                "spec": {**spec, "nodeName": f"w{number + 1}"},
            }
            for number in range(NODES)
        ]  # fmt: skip


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if not (programs() / "versions").exists():
        pytest.skip(f"the programs of Kubernetes are not in {programs()}: run ci/kubernetes/build")
    missing = [name for name in _SYSTEM if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"nodes of a cluster need root, and {', '.join(missing) or 'its programs'}")
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        pytest.skip("this kubelet is used with cgroups of version 1")
    base = Path(tempfile.mkdtemp(prefix="torchaos-kubernetes-", dir="/var/tmp"))
    base.chmod(0o755)
    one = Cluster(base)
    try:
        with open(base / "up.log", "w") as log:
            done = subprocess.run(
                one.argv("up", str(programs()), str(NODES)), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                check=False, timeout=240,
            )  # fmt: skip
        assert done.returncode == 0, (base / "up.log").read_text()[-2000:]
        wait_until(lambda: one.kubectl("get", "nodes", "--no-headers").split().count("Ready"), NODES.__eq__, 120)
        _give_rights(one)
        yield one
    finally:
        subprocess.run(one.argv("down"), check=False, timeout=60)
        _remove(base)


def _give_rights(cluster: Cluster) -> None:
    """Gives the user the Role of docs/kubernetes.md, and the rights to create pods, because the tests have no Job, and
    to evict them."""
    (cluster.base / "home").mkdir()
    text = (_ROOT / "docs" / "kubernetes.md").read_text()
    role = yaml.safe_load(
        next(part for part in text.split("```") if part.startswith("yaml\n") and "kind: Role" in part)[5:]
    )
    role["metadata"]["namespace"] = "default"
    role["rules"].append({"apiGroups": [""], "resources": ["pods", "pods/eviction"], "verbs": ["create"]})
    binding = {
        "apiVersion": role["apiVersion"], "kind": "RoleBinding", "metadata": role["metadata"],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]},
        "subjects": [{"kind": "User", "name": USER}],
    }  # fmt: skip
    cluster.kubectl("create", "--filename=-", given=yaml.safe_dump_all([role, binding]))


def _remove(base: Path) -> None:
    end = time.monotonic() + 20.0
    while base.exists() and time.monotonic() < end:  # a namespace that ends may keep a mount for a moment
        shutil.rmtree(base, ignore_errors=True)
