"""A stand-in for kubectl and its cluster, in a folder: `kubectl.py CLUSTER WORDS...`. A pod is a process in a mount and
a pid namespace of its own, in which each emptyDir of the pod is an empty file system. It knows the calls that torchaos
makes, and refuses all others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENTER = ["nsenter", "--mount", "--pid", "--target"]


def main(cluster: Path, words: list[str]) -> int:
    cluster.mkdir(exist_ok=True)
    plain = [word for word in words if not word.startswith(("--context=", "--namespace="))]
    verb, rest = plain[0], plain[1:]
    options = dict(word.partition("=")[::2] for word in rest if word.startswith("--"))
    label = options.get("--selector", "")
    if verb == "auth":
        print("no" if " ".join(rest[1:3]) in _forbidden(cluster) else "yes")
        return int(" ".join(rest[1:3]) in _forbidden(cluster))
    if verb == "api-versions":
        print("policy/v1")
    elif verb == "create" and (path := options.get("--raw")):
        _start(cluster, "end", path.split("/")[-2])
    elif verb == "create":
        given = json.load(sys.stdin)  # torchaos sends no YAML
        for made in given.get("items", [given]):
            _make(cluster, made)
    elif verb == "get" and options["--output"].startswith("jsonpath="):
        statuses = [one for pod in _pods(cluster) if pod.name == rest[1] for one in _statuses(pod)]
        print(*[one["containerID"] for one in statuses if "running" in one["state"]])
    elif verb == "get" and rest[0] == "pod":
        print(*[json.dumps(_as_seen(pod)) for pod in _pods(cluster) if pod.name == rest[1]])
    elif verb == "get" and options["--output"] == "json":
        print(json.dumps({"items": [_as_seen(pod) for pod in _pods(cluster, label)]}))
    elif verb == "get" and f"list {rest[0].partition(',')[0]}" in _forbidden(cluster):
        raise SystemExit(f"Error from server (Forbidden): {rest[0]}")
    elif verb == "get":
        print(*[f"pod/{pod.name}" for pod in _pods(cluster, label)])
    elif verb == "delete":  # without waiting, as kubectl does for a user without the right to watch
        for pod in _pods(cluster, label):
            if label or pod.name == rest[1]:
                _start(cluster, "end", pod.name)
    elif verb == "end":
        _end(cluster / rest[0])
    elif verb == "exec":
        at = words.index("--")
        name = next(word for word in rest if not word.startswith("-"))
        return _enter(cluster / name, words[at + 1 :])
    elif verb == "logs" and "--follow" not in options:
        log_file = cluster / next(word for word in rest if not word.startswith("-")) / "log"
        print(*log_file.read_text().splitlines()[-int(options["--tail"]) :], sep="\n")
    elif verb == "logs":
        pod = cluster / next(word for word in rest if not word.startswith("-"))
        with (pod / "log").open() as log:
            log.seek(0, os.SEEK_END)  # --tail=0
            exited = ""
            while not exited and pod.exists():
                time.sleep(0.05)
                exited = _exited(pod)
                print(log.read(), end="", flush=True)
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
    (cluster / "asked.json").write_text(json.dumps(template["spec"]))
    for index in range(spec["completions"]):
        pod = cluster / f"{made['metadata']['name']}-{index}"
        pod.mkdir()
        env = {one["name"]: one["value"] for one in template["spec"]["containers"][0].get("env", [])}
        metadata = {
            **template["metadata"], "name": pod.name, "uid": str(pod.stat().st_ino),
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        }  # fmt: skip
        about = {"metadata": metadata, "spec": template["spec"], "env": {**env, "JOB_COMPLETION_INDEX": str(index)}}
        (pod / "pod.json").write_text(json.dumps(about))
        _start(cluster, "live", pod.name)


def _start(cluster: Path, *words: str) -> None:
    """Starts this program in the background."""
    with open(cluster / words[-1] / "log", "a") as log:
        command = [sys.executable, "-I", "-S", __file__, str(cluster), *words]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


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
        key, _, value = label.partition("=")
        if not label or about["metadata"]["labels"].get(key) == value:
            yield file.parent


def _exited(pod: Path) -> str:
    """The exit code of the first container, when that has ended."""
    return (pod / "exit").read_text() if (pod / "exit").exists() else ""


def _phase(pod: Path) -> str:
    if not (pod / "pid").exists():
        return "Pending"
    exited, containers = _exited(pod), json.loads((pod / "pod.json").read_text())["spec"]["containers"]
    if not exited or len(containers) > 1:  # the others never end
        return "Running"
    return "Succeeded" if exited == "0" else "Failed"


def _statuses(pod: Path) -> list[dict[str, Any]]:
    """The states of the containers. All but the first never end."""
    exited, containers = _exited(pod), json.loads((pod / "pod.json").read_text())["spec"]["containers"]
    first: dict[str, Any] = {"terminated": {"exitCode": int(exited)}} if exited else {"running": {}}
    states = [first, *({"running": {}} for _ in containers[1:])]
    return [
        {"name": one["name"], "containerID": f"{pod.stat().st_ino}-{one['name']}", "state": state}
        for one, state in zip(containers, states, strict=True)
    ]


def _as_seen(pod: Path) -> dict[str, Any]:
    about = json.loads((pod / "pod.json").read_text())
    status = {"phase": _phase(pod), "podIP": "127.0.0.1", "containerStatuses": _statuses(pod)}
    return {"metadata": about["metadata"], "spec": about["spec"], "status": status}


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
        while not _exited(pod) and pod.exists() and time.monotonic() < end:
            time.sleep(0.05)
    shutil.rmtree(pod, ignore_errors=True)  # another deletion may be first


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
