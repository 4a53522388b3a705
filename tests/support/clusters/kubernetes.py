"""A real Kubernetes of two nodes, each a set of namespaces of this machine: see kubernetes.sh."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from dying.families import BARE_PYTHON
from waiting import wait_until

from clusters.machines import Machines, folder_for, running
from clusters.runs import ClusterRun

_ROOT = Path(__file__).parents[3]
_SCRIPT = Path(__file__).with_name("kubernetes.sh")
_SYSTEM = ("unshare", "nsenter", "ip", "openssl", "iptables")
NODES = 2
USER = "chaos"


def programs() -> Path:
    """The folder in which lab/kubernetes/build keeps the programs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCHAOS_KUBERNETES") or cache / "torchaos" / "kubernetes")


class Kubernetes(Machines):
    """The nodes `cp` (the control plane), `w1` and `w2`."""

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

    def kubectl(self, *words: str, given: str = "") -> str:
        return self.as_root("cp", "kubectl", *words, given=given)

    def restart(self, program: str, node: str) -> None:
        """Kills one of the cluster's own programs, and starts it again with the same arguments."""
        (pid,) = [pid for pid in self.pids(node, program) if self._is_program(node, pid, program)]
        words = self.as_root(node, "cat", f"/proc/{pid}/cmdline").split("\0")[:-1]
        self.as_root(node, "kill", "-KILL", str(pid))
        with open(self.base / node / f"{program}.log", "a") as log:
            subprocess.Popen(
                self.argv("in", node, *words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip

    def _is_program(self, node: str, pid: int, program: str) -> bool:
        return self.as_root(node, "cat", f"/proc/{pid}/comm").strip() == program[:15]

    def objects(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", *words, "--output=json"))["items"]
        return found

    def outer_pids(self, node: str, run: str, inner: Sequence[int]) -> list[int]:
        """The pids on the node of processes of a run, given by their pids in its pod."""
        found = []
        for line in self.as_root(node, "sh", "-c", "grep -H ^NSpid: /proc/[0-9]*/status").splitlines():
            numbers = [int(number) for number in line.rpartition(":")[2].split()]
            if len(numbers) == 2 and numbers[1] in inner:
                environ = self.as_root(node, "cat", f"/proc/{numbers[0]}/environ")
                found += [numbers[0]] if f"{run}-s0" in environ else []
        return found

    def work(self) -> str:
        """The names of the pods that the cluster has."""
        return self.kubectl("get", "pods", "--output=name")

    def pods(
        self, name: str, *, share: Sequence[Path] = (), more: Mapping[str, Any] | None = None, adds: Sequence[str] = ()
    ) -> list[Any]:  # fmt: skip
        """Two pods, one on each node, that have this machine's programs and Python. `share`: folders that the pods see
        at the same path as torchaos. `more`: more of their spec. `adds`: capabilities of their container."""
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
            "securityContext": {"capabilities": {"add": list(adds)}},
        }  # fmt: skip
        spec = {
            "automountServiceAccountToken": False, "enableServiceLinks": False, "terminationGracePeriodSeconds": 10,
            "dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}, "volumes": volumes,
            **(more or {}), "containers": [container, *(more or {}).get("containers", [])],
        }  # fmt: skip
        return [
            {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-{number}"},
                "spec": copy.deepcopy({**spec, "nodeName": f"w{number + 1}"}),
            }
            for number in range(NODES)
        ]  # fmt: skip


class KubernetesRun(ClusterRun):
    """Node 0 is a pod on w1, node 1 a pod on w2. `pods`: what the pods have, see `Kubernetes.pods`."""

    launcher = "kubernetes"
    nodes = ("cp", "w1", "w2")
    python = BARE_PYTHON
    patience_s = 60.0

    def __init__(self, cluster: Any, name: str, *faults: Any, pods: Mapping[str, Any] | None = None, **more: Any):
        self._manifest = cluster.shared / f"{name}.pods.yaml"
        self._manifest.write_text(yaml.safe_dump_all(cluster.pods(name, **(pods or {}))))
        super().__init__(cluster, name, *faults, **more)

    def of_job(self) -> Mapping[str, Any]:
        return {"pods": {"manifest": str(self._manifest), "python": sys.executable}}

    def of_machine(self, pids: Sequence[int]) -> list[int]:
        found: list[int] = self.cluster.outer_pids("w2", self.name, pids)
        return found


def missing() -> str:
    """What this machine lacks for such a cluster, or an empty text."""
    if not (programs() / "versions").exists():
        return f"the programs of Kubernetes are not in {programs()}: run lab/kubernetes/build"
    lacks = [name for name in _SYSTEM if shutil.which(name) is None]
    if os.geteuid() != 0 or lacks:
        return f"nodes of a cluster need root, and {', '.join(lacks) or 'its programs'}"
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "this kubelet is used with cgroups of version 1"
    return ""


@contextmanager
def cluster() -> Iterator[Kubernetes]:
    """A context manager in which the cluster runs."""
    with folder_for("kubernetes") as base:
        one = Kubernetes(_SCRIPT, base)
        with running(one, str(programs()), str(NODES), timeout_s=240) as wrong:
            assert not wrong, wrong
            await_ready(one)
            _give_rights(one)
            yield one


def await_ready(cluster: Kubernetes) -> None:
    """Waits until the API server answers, and all machines take pods."""
    wait_until(lambda: cluster.kubectl("get", "nodes", "--no-headers").split().count("Ready"), NODES.__eq__, 120)


def _give_rights(cluster: Kubernetes) -> None:
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
