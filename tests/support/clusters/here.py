"""This machine, with the face of a cluster."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusters.machines import Machines
from clusters.runs import ClusterRun


@dataclass
class Here(Machines):
    """`env`: more of the environment of what it starts."""

    env: Mapping[str, str] = field(default_factory=dict)

    def popen(self, *command: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            command, cwd=self.shared, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **self.env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def as_root(self, node: str, *command: str, given: str = "") -> str:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=300)
        return done.stdout

    def work(self) -> str:
        return ""


class LocalRun(ClusterRun):
    launcher = "local"
    nodes = ("here",)
    one_node = True

    def of_job(self) -> Mapping[str, Any]:
        return {"nodes": 1}


class NetnsRun(ClusterRun):
    launcher = "netns"
    nodes = ("here",)


class DockerRun(ClusterRun):
    launcher = "docker"
    nodes = ("here",)

    def of_job(self) -> Mapping[str, Any]:
        """The packages may be in the site of another environment, which this environment names in a .pth file."""
        sites = {str(Path(importlib.util.find_spec(name).origin or "").parents[1]) for name in ("torch", "yaml")}  # type: ignore[union-attr]
        return {"container": {"image": "host", "mounts": [f"{site}:{site}:ro" for site in sorted(sites)]}}
