"""Asks Docker's engine, kubectl and Slurm's programs, with the rights and the configuration of the user.

The Docker engine must be on this machine and have a Unix socket, because the harness also reads the nodes' processes,
files and network from this machine. Everything that a run makes in the engine has the run's id as a label."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchaos.harness.interfaces import UsageError

RUN, NODE = "torchaos.run", "torchaos.node"  # names of labels
USUAL = "unix:///var/run/docker.sock"
ANSWER_S = 20.0  # seconds for one request; to remove a container on a busy disk takes several


class EngineError(OSError):
    """The engine does not answer, or refuses a request."""


def address() -> str:
    """The address of the user's Docker engine. Raises UsageError if it is not a socket of this machine."""
    given = os.environ.get("DOCKER_HOST") or USUAL
    if not given.startswith("unix://"):
        raise UsageError(f"DOCKER_HOST is {given}; nodes can only be containers of this machine: give unix://SOCKET")
    return given


@contextmanager
def engine(where: str, timeout_s: float = ANSWER_S) -> Iterator[Any]:
    """A context manager with a docker.APIClient. Inside the `with` block, the client's errors become EngineErrors with
    the message of the engine."""
    _check_socket(where)
    try:
        import docker
        from docker.errors import DockerException
        from requests.exceptions import RequestException
    except ImportError as error:
        raise EngineError(f"no connection to Docker: {error}; pip install 'torchaos[docker]'") from error
    client = None
    try:
        client = docker.APIClient(base_url=where, version="auto", timeout=timeout_s)
        yield client
    except (DockerException, RequestException) as error:
        words = getattr(error, "explanation", None) or error
        raise EngineError(f"the Docker engine at {where}: {words}") from error
    finally:
        if client is not None:
            client.close()


def _check_socket(where: str) -> None:
    """Raises EngineError if there is no socket at the address. The address may come from a damaged undo log and name
    any file."""
    try:
        found = stat.S_ISSOCK(os.stat(where.removeprefix("unix://")).st_mode)
    except (OSError, ValueError) as error:
        raise EngineError(f"the Docker engine at {where} does not answer: {error}; start it") from error
    if not found:
        raise EngineError(f"the Docker engine at {where} does not answer: this is not a socket")


def version(where: str) -> str:
    """The engine's version. Raises EngineError if it does not answer within 5 seconds."""
    with engine(where, 5.0) as client:
        return str(client.version()["Version"])


def of_run(run_id: str, node: int | None = None) -> dict[str, Any]:
    """The filter that selects all objects of a run or, with `node`, of one node of the run."""
    return {"label": [f"{RUN}={run_id}", *([] if node is None else [f"{NODE}={node}"])]}


def container_of(client: Any, run_id: str, node: int) -> Any:
    """The engine's current description of the node's container. Raises EngineError if there is none."""
    found = client.containers(all=True, filters=of_run(run_id, node))
    if not found:
        raise EngineError(f"node {node} has no container now")
    return client.inspect_container(found[0]["Id"])


def events(client: Any, container: str, since_s: float) -> list[Any]:
    """The engine's events about a container, from `since_s` (seconds since the epoch) until now."""
    # With `until` in the past, the engine sends the events that it remembers (256) and closes the stream.
    stream = client.events(since=f"{since_s:.6f}", until=f"{time.time():.6f}", decode=True)
    actors = [(event, event["Actor"]) for event in stream]
    return [event for event, actor in actors if container in (actor["ID"], actor["Attributes"].get("container"))]


_ASK_S = 30.0
_MOST_WORDS = 600  # characters


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl. An empty `context` or `namespace` means that of the user's kubeconfig."""

    context: str = ""
    namespace: str = ""

    def argv(self, *words: str) -> list[str]:
        where = {"--context": self.context, "--namespace": self.namespace}
        return ["kubectl", *(f"{option}={value}" for option, value in where.items() if value), *words]

    def ask(self, *words: str, given: bytes = b"", timeout_s: float = _ASK_S) -> str:
        """The output of kubectl. `given`: its standard input. Raises OSError with the last lines of its error output if
        it fails, and TimeoutError if it does not answer in time."""
        return self.said(self.argv(*words), given, timeout_s)

    def may(self, verb: str, resource: str) -> bool:
        """Whether the user has the right to `verb` this resource. Raises OSError if the cluster does not answer."""
        try:
            return self.ask("auth", "can-i", verb, resource).split()[:1] == ["yes"]
        except _Refused as error:
            if error.printed.split()[:1] == ["no"]:
                return False
            raise

    @staticmethod
    def said(argv: Sequence[str], given: bytes, timeout_s: float) -> str:
        """The output of a complete command line that runs kubectl. Raises the same errors as `ask`."""
        done = _run(argv, given, timeout_s)
        printed = done.stdout.decode(errors="replace")
        if done.returncode:
            raise _Refused(last_words("kubectl", done.stderr.decode(errors="replace"), done.returncode), printed)
        return printed

    @staticmethod
    def outcome(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """The exit code and all output of a complete command line. Raises TimeoutError if it takes longer than
        `timeout_s`."""
        done = _run(argv, b"", timeout_s)
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace").strip()


def last_words(program: str, said: str, code: int) -> str:
    """The name of a program that failed, and the last complete lines of its error output, without the lines of
    kubectl's log, such as `E0131 13:52 ...`, and without the name that each line of a program of Slurm begins with."""
    lines = [line.strip() for line in said.splitlines() if not re.match(r"[EIWF]\d{4} |Warning: ", line)]
    lines = [line.removeprefix(f"{program}: ") for line in lines if line]
    while len(lines) > 1 and len(" ".join(lines)) > _MOST_WORDS:
        lines.pop(0)
    return f"{program}: {' '.join(lines)[:_MOST_WORDS] or f'exit code {code}'}"


def _run(argv: Sequence[str], given: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(argv, input=given, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"kubectl has not answered for {timeout_s:g} s: {' '.join(argv[1:6])}") from error


class _Refused(OSError):
    """kubectl ended with an error. `printed`: its standard output."""

    def __init__(self, text: str, printed: str) -> None:
        super().__init__(text)
        self.printed = printed


ASK_S = 20.0
_UNKNOWN = "Invalid job id"  # Slurm's answer about a job that ended some time ago


def ask(argv: Sequence[str], timeout_s: float = ASK_S, given: str = "") -> str:
    """The output of one of Slurm's programs. Empty if Slurm does not know the job any more. Raises OSError if the
    program fails, TimeoutError if it does not answer."""
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{argv[0]} has not answered for {timeout_s:g} s") from error
    if done.returncode and _UNKNOWN not in done.stderr:
        raise OSError(last_words(argv[0], done.stderr, done.returncode))
    return "" if done.returncode else done.stdout


def about_job(job: str) -> Mapping[str, str]:
    """What Slurm says about a job, by name, such as JobState, Restarts and NodeList. Empty if it does not know the job
    any more. Raises OSError if Slurm does not answer."""
    return dict(re.findall(r"(\w+)=(\S*)", ask(["scontrol", "--oneliner", "show", "job", job])))


def hosts_of(names: str) -> list[str]:
    """The hosts in a list such as n[1-4], sorted as text, because torchelastic numbers the nodes in that order. Raises
    OSError if Slurm does not answer."""
    return sorted(ask(["scontrol", "show", "hostnames", names]).split()) if names else []


def about_node(host: str) -> tuple[str, str]:
    """The state of a node, such as idle, down* or draining, and the reason that was given for it (empty if there is
    none). Raises OSError if Slurm does not answer."""
    lines = ask(["sinfo", "--noheader", f"--nodes={host}", "--format=%T|%E"]).splitlines()
    if not lines:
        raise OSError(f"Slurm knows no node {host}")
    state, _, reason = lines[0].partition("|")
    return state, "" if reason == "none" else reason
