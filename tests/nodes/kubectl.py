"""A stand-in for kubectl and its cluster, in a folder: `kubectl.py CLUSTER WORDS...`. A pod is a process in a mount and
a pid namespace of its own, in which each emptyDir of the pod is an empty file system. It knows the calls that torchaos
makes, and refuses all others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_ENTER = ["nsenter", "--mount", "--pid", "--target"]


def main(cluster: Path, words: list[str]) -> int:
    cluster.mkdir(exist_ok=True)
    plain = [word for word in words if not word.startswith(("--context=", "--namespace="))]
    verb, rest = plain[0], plain[1:]
    options = dict(word.partition("=")[::2] for word in rest if word.startswith("--"))
    label = options.get("--selector", "").partition("=")[2]
    if verb == "auth":
        print("no" if " ".join(rest[1:3]) in _forbidden(cluster) else "yes")
        return int(" ".join(rest[1:3]) in _forbidden(cluster))
    if verb == "create":
        for made in yaml.safe_load_all(sys.stdin):
            _make(cluster, made)
    elif verb == "get" and options["--output"] == "json":
        print(json.dumps({"items": [_as_seen(pod) for pod in _pods(cluster, label)]}))
    elif verb == "get" and rest[0] == "pod":
        print(*[_phase(pod) for pod in _pods(cluster) if pod.name == rest[1]])
    elif verb == "get":
        print(*[f"pod/{pod.name}" for pod in _pods(cluster, label)])
    elif verb == "delete":
        for pod in _pods(cluster, label):
            _end(pod)
    elif verb == "exec":
        at = words.index("--")
        return _enter(cluster / rest[1], words[at + 1 :])
    elif verb == "logs":
        while _phase(cluster / rest[1]) == "Running":
            time.sleep(0.1)
        print((cluster / rest[1] / "log").read_text())
    elif verb == "live":
        return _live(cluster / rest[0])
    else:
        raise SystemExit(f"the stand-in does not know {' '.join(words)}")
    return 0


def _forbidden(cluster: Path) -> list[str]:
    """The rights that the user lacks, such as `create pods/exec`: a test writes them."""
    file = cluster / "forbidden"
    return file.read_text().splitlines() if file.exists() else []


def _make(cluster: Path, made: dict[str, Any]) -> None:
    spec, template = made["spec"], made["spec"]["template"]
    for index in range(spec["completions"]):
        pod = cluster / f"{made['metadata']['name']}-{index}"
        pod.mkdir()
        env = {one["name"]: one["value"] for one in template["spec"]["containers"][0].get("env", [])}
        metadata = {
            **template["metadata"], "name": pod.name,
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        }  # fmt: skip
        about = {"metadata": metadata, "spec": template["spec"], "env": {**env, "JOB_COMPLETION_INDEX": str(index)}}
        (pod / "pod.json").write_text(json.dumps(about))
        with open(pod / "log", "w") as log:
            subprocess.Popen(
                [sys.executable, __file__, str(cluster), "live", pod.name], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip


def _live(pod: Path) -> int:
    """The life of a pod: its process, and its exit code when that is over."""
    about = json.loads((pod / "pod.json").read_text())
    spec = about["spec"]
    container = spec["containers"][0]
    empty = [one["mountPath"] for one in container.get("volumeMounts", [])]
    mounts = "".join(f"mkdir -p {path}; mount -t tmpfs none {path}; " for path in empty)
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", f'{mounts} exec "$@"', "sh",
         *container["command"]], env={**os.environ, **about["env"]},
    )  # fmt: skip
    (pod / "pid").write_text(str(process.pid))
    (pod / "exit").write_text(str(process.wait()))
    return 0


def _pods(cluster: Path, label: str = "") -> Iterator[Path]:
    for file in sorted(cluster.glob("*/pod.json")):
        about = json.loads(file.read_text())
        if not label or about["metadata"]["labels"]["torchaos.run"] == label:
            yield file.parent


def _phase(pod: Path) -> str:
    if not (pod / "pid").exists():
        return "Pending"
    exited = (pod / "exit").exists() and (pod / "exit").read_text()
    return "Running" if not exited else "Succeeded" if exited == "0" else "Failed"


def _as_seen(pod: Path) -> dict[str, Any]:
    about = json.loads((pod / "pod.json").read_text())
    return {
        "metadata": about["metadata"],
        "spec": about["spec"],
        "status": {"phase": _phase(pod), "podIP": "127.0.0.1"},
    }


def _first_process(pod: Path) -> int:
    """Process 1 of the pod, as this machine numbers it; 0 if it is not there."""
    outer = (pod / "pid").read_text() if (pod / "pid").exists() else "0"
    try:
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
    except (OSError, IndexError):
        return 0


def _enter(pod: Path, command: list[str]) -> int:
    first = _first_process(pod)
    if not first:
        print(f"error: cannot exec into pod {pod.name}; current phase is {_phase(pod)}", file=sys.stderr)
        return 1
    env = json.loads((pod / "pod.json").read_text())["env"]
    return subprocess.run([*_ENTER, str(first), *command], env={**os.environ, **env}, check=False).returncode


def _end(pod: Path) -> None:
    for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        end = time.monotonic() + wait_s
        if first := _first_process(pod):
            os.kill(first, number)
        while _phase(pod) == "Running" and time.monotonic() < end:
            time.sleep(0.05)
    for file in pod.iterdir():
        file.unlink()
    pod.rmdir()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
