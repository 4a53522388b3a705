"""Nodes of a Slurm cluster. The job is one step with one task on each node. The step is in an allocation of the user in
which torchaos runs, in an allocation that the run asks for, or in a batch job, which Slurm can start again. Slurm's own
programs are used, with the rights of the user."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from torchaos.harness.host.cluster_tools import about_job, about_node, ask, hosts_of, last_words
from torchaos.harness.interfaces import Capability, ChaosError, Handle, JobSpec, Node, RemoteLauncher, UsageError
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.record.plan import counted
from torchaos.harness.rollback.cluster_handles import SlurmWork
from torchaos.harness.scenario.field_types import Strict


@dataclass(frozen=True)
class SlurmNode:
    """A node of an allocation. `step`: the name of the job's step. `restarts`: how often Slurm had restarted the
    allocation before. The methods that ask Slurm raise OSError if it refuses or does not answer."""

    index: int
    host: str
    job: str
    step: str = ""
    restarts: str = "0"
    env: Mapping[str, str] = field(default_factory=dict)
    link: ClassVar[None] = None

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command as a step of its own. The step may run beside the job's step, even if the job's step has all
        processors, all memory and all GPUs."""
        return [
            "srun", "--overlap", f"--jobid={self.job}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1",
            f"--nodelist={self.host}", "--mem=0", "--gres=none", "--unbuffered", "--quiet", *command,
        ]  # fmt: skip

    def host_pid(self, pid: int) -> int | None:
        return None

    def over(self) -> bool:
        """Whether Slurm says that the job's step does not run on this node any more."""
        about = about_job(self.job)
        if about.get("JobState") != "RUNNING" or about.get("Restarts", "0") != self.restarts:
            return True
        return self.host not in hosts_of(about.get("NodeList", "")) or not self._steps()

    def state(self) -> str:
        """The state of the node, such as allocated or draining."""
        return about_node(self.host)[0]

    def cancel_step(self, signal: str) -> None:
        steps = self._steps()
        if not steps:
            raise OSError("the job's step had ended before the fault could hit it")
        ask(["scancel", f"--signal={signal}", *steps])

    def requeue(self) -> None:
        ask(["scontrol", "requeue", self.job])

    def take_out(self, state: str, reason: str) -> None:
        """Sets the node's state. Raises OSError if the node is out of service already: then torchaos must not put it
        back into service."""
        now, why = about_node(self.host)
        if why:
            raise OSError(f"node {self.host} is {now} already, with the reason: {why}")
        ask(["scontrol", "update", f"nodename={self.host}", f"state={state}", f"reason={reason}"])

    def displace(self, name: str, partition: str, time_s: float) -> None:
        """Submits a job that takes the whole node for `time_s` seconds."""
        ask([
            "sbatch", "--parsable", f"--job-name={name}", f"--partition={partition}", f"--nodelist={self.host}",
            "--nodes=1", "--exclusive", f"--time={math.ceil(time_s / 60) + 1}", "--output=/dev/null", "--no-requeue",
            f"--wrap=sleep {time_s:g}",
        ])  # fmt: skip

    def _steps(self) -> list[str]:
        lines = ask(["squeue", "--noheader", "--steps", "--jobs", self.job, "--format=%i|%j"]).splitlines()
        found = (line.strip().partition("|") for line in lines)
        return [id_ for id_, _, name in found if name == self.step]


_SPARE_S = 300.0  # added to the allocation's time limit, after which Slurm ends everything
_QUEUE_S = 24 * 3600.0  # seconds to wait for an allocation
_COMPLETING_S = 120.0  # seconds to wait while Slurm cleans up after a job; with a node that is down, that may never end
_LOOK_S = 0.2
_GOING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")
_NO_NETWORK = (
    "a Slurm user may not change the network of a node (CAP_NET_ADMIN); write launcher: netns, which makes nodes with "
    "networks of their own on one machine"
)
# The script of a batch job. It waits for a file with the command; after a requeue, this is another file.
_BATCH = """#!/bin/sh
launch={}-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}.sh
until [ -e "$launch" ]; do sleep 0.2; done
exec sh "$launch"
"""
# Ends when this start of the batch job has ended, with exit code 0 if the job is complete. Goes on while Slurm's
# controller does not answer.
_UNTIL_OVER = """
while
    case $(scontrol --oneliner show job "$1" 2>&1) in
    *JobState=COMPLETING*) ;;
    *JobState=RUNNING*" Restarts=$2 "*) ;;
    *JobState=COMPLETED*) exit 0 ;;
    *JobState=* | *"Invalid job id"*) exit 1 ;;
    esac
do sleep 0.5; done
"""


class SlurmJob(Strict):
    """How the launcher slurm starts the job."""

    submit: Annotated[
        Literal["steps", "batch"],
        Field(description="steps: a step of an allocation. batch: a batch job, which Slurm can start again."),
    ] = "steps"


def _slurm() -> str | None:
    """The paths of Slurm's programs. None if a program is missing or no controller answers."""
    found = [shutil.which(name) for name in ("srun", "salloc", "squeue", "scancel", "scontrol")]
    try:
        return ", ".join(map(str, found)) if all(found) and " is UP" in ask(["scontrol", "ping"]) else None
    except OSError:
        return None


def _slurm_admin() -> str | None:
    """The role of this user in Slurm, if that role may change the states of nodes. None otherwise."""
    if shutil.which("scontrol") is None:
        return None
    try:
        config = ask(["scontrol", "show", "config"])
        owner = re.search(r"^SlurmUser\s*=\s*\S+\((\d+)\)", config, re.MULTILINE)
        if os.geteuid() == 0 or (owner and int(owner[1]) == os.geteuid()):
            return "root or Slurm's own user"
        level = ask(["sacctmgr", "--noheader", "--parsable2", "show", "user", getuser(), "format=adminlevel"]).strip()
    except (OSError, KeyError):
        return None
    return level if level in ("Operator", "Administrator") else None


@dataclass
class Slurm(RemoteLauncher):
    """Each node is a machine of a Slurm cluster. Inside an allocation (SLURM_JOB_ID), the job is a step of that
    allocation. Otherwise `salloc` gets an allocation; its options come from the user's SALLOC_* variables, and its time
    limit from the job's time-out. With `submit: batch`, the job is submitted as a batch job; its options come from
    SBATCH_* variables."""

    slurm: Annotated[SlurmJob | None, Field(description="For launcher: slurm.")] = None

    name: ClassVar[str] = "slurm"
    needs: ClassVar[frozenset[str]] = frozenset({"slurm"})
    checks: ClassVar[Mapping[str, Capability]] = {
        "slurm": Capability(
            "nodes of a Slurm cluster",
            _slurm,
            "run it where Slurm's programs are on the PATH and scontrol ping finds a controller, as on a login node",
        ),
        "slurm_admin": Capability(
            "states of a Slurm cluster's nodes",
            _slurm_admin,
            "needs a controller that answers, and a user who may change nodes (root, Slurm's own user, its operators "
            "and administrators): ask one of them, on a staging cluster",
        ),
    }
    makes: ClassVar[Mapping[str, str]] = {"slurm": "is done by Slurm"}
    sets_rendezvous: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "links": _NO_NETWORK,
        "docker": "the nodes are no containers; write launcher: docker",
        "endpoints": "the nodes do not reach a proxy of the harness's; write launcher: local or netns",
        "node.reboot": "Slurm starts the command on a node only once; write node.freeze or node.kill",
    }

    def __post_init__(self) -> None:
        self._in_batch = self.slurm is not None and self.slurm.submit == "batch"
        self._theirs = "" if self._in_batch else os.environ.get("SLURM_JOB_ID", "")
        self._own = ""
        self._given_up = threading.Event()

    def refuses(self, injector: Any) -> str:
        needs_batch = getattr(injector, "batch", False) and not self._in_batch
        return "only a batch job has it; write job.slurm: {submit: batch}" if needs_batch else ""

    def give_up(self) -> None:
        self._given_up.set()

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        if self._theirs:
            return (SlurmWork(_step(spec), self._theirs),)
        return (SlurmWork(spec.env[ENV_RUN_ID]),)

    def create(self, spec: JobSpec) -> Sequence[SlurmNode]:
        """The nodes of the allocation. Raises UsageError if the user's own allocation is too small, or if Slurm grants
        none or does not answer."""
        try:
            if not self._theirs and not self._goes_on(spec):
                self._own = _submit(spec) if self._in_batch else self._allocate(spec)
            job = self._theirs or self._own
            about = self._await_running(job)
            hosts = hosts_of(about["NodeList"])
        except OSError as error:
            raise UsageError(str(error)) from error
        if len(hosts) < spec.nodes:
            raise UsageError(f"job.nodes wants {counted(spec.nodes, 'node')}, and allocation {job} has {len(hosts)}")
        restarts = about.get("Restarts", "0")
        return [SlurmNode(index, host, job, _step(spec), restarts) for index, host in enumerate(hosts[: spec.nodes])]

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        ours = [node for node in nodes if isinstance(node, SlurmNode)]
        hosts, count, job = ",".join(node.host for node in ours), len(ours), ours[0].job
        step = [
            "srun", f"--jobid={job}", f"--job-name={_step(spec)}", f"--nodes={count}", f"--ntasks={count}",
            "--ntasks-per-node=1", f"--nodelist={hosts}", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered",
            "--input=none", *wrapper, "--hosts", hosts, "--", *spec.argv,
        ]  # fmt: skip
        if not self._in_batch:
            return [step]
        env = [f"{name}={value}" for name, value in spec.own_env.items()]
        file = Path(f"{_launch(spec)}-{job}-{ours[0].restarts}.sh")
        partial = file.with_suffix(".partial")
        partial.write_text(f"exec {shlex.join(['env', '-C', str(spec.cwd), *env, *step])}\n")
        partial.rename(file)
        return [["sh", "-c", _UNTIL_OVER, "sh", job, ours[0].restarts]]

    def gone(self, node: Node) -> bool:
        """Whether Slurm has ended everything of the job on the node. False if this is not known, because the node or
        Slurm does not answer."""
        assert isinstance(node, SlurmNode)
        with suppress(OSError):
            return node.over() and not node.state().endswith("*")
        return False

    def _goes_on(self, spec: JobSpec) -> bool:
        """Whether the run's own allocation can be used for this submission, too. Slurm may have restarted a batch job,
        or may be about to restart it. An allocation that has lost nodes is cancelled."""
        about = about_job(self._own) if self._own else {}
        end = time.monotonic() + _COMPLETING_S
        while about.get("JobState") == "COMPLETING" and time.monotonic() < end:  # then it may be pending again
            self._pause()
            about = about_job(self._own)
        if about.get("JobState") not in _GOING:
            return False
        if about["JobState"] != "RUNNING":
            with suppress(OSError):  # Slurm waits for two minutes before it starts a requeued job
                ask(["scontrol", "update", f"jobid={self._own}", "StartTime=now"])
            return True
        # A job that is being preempted runs only until its grace time is over.
        doomed = about.get("PreemptTime", "None") != "None"
        if not doomed and len(hosts_of(about.get("NodeList", ""))) >= spec.nodes:
            return True
        ask(["scancel", "--quiet", self._own])
        return False

    def _allocate(self, spec: JobSpec) -> str:
        """Gets a new allocation and returns its id. Slurm ends the allocation some time after the job's time-out."""
        argv = ["salloc", "--no-shell", "--no-kill", *_size(spec)]
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as salloc:
            try:
                end = time.monotonic() + _QUEUE_S
                while salloc.poll() is None and time.monotonic() < end:
                    self._pause()
            finally:
                salloc.terminate()  # withdraws the request if it is still in the queue
            assert salloc.stdout is not None
            said = salloc.stdout.read()
        if (found := re.search(r"Granted job allocation (\d+)", said)) is None:
            raise UsageError(f"Slurm gave no allocation: {last_words('salloc', said, salloc.returncode)}")
        return found[1]

    def _await_running(self, job: str) -> Mapping[str, str]:
        """Waits until the nodes of the job are ready, and returns Slurm's description of the job. Raises UsageError if
        that takes too long or can't happen any more."""
        end = time.monotonic() + _QUEUE_S
        while (about := about_job(job)).get("JobState") in _GOING and time.monotonic() < end:
            if about["JobState"] == "RUNNING" and about.get("Reason") == "None":
                return about
            self._pause()
        raise UsageError(f"allocation {job} is not ready: {about.get('JobState', 'it is over')}")

    def _pause(self) -> None:
        """Waits a moment. Raises ChaosError if the run ends."""
        if self._given_up.wait(_LOOK_S):
            raise ChaosError("the run ended while it waited for nodes")


def _step(spec: JobSpec) -> str:
    """The name of the job's step. Each submission has another name."""
    return f"{spec.env[ENV_RUN_ID]}.{spec.submission}" if spec.submission else spec.env[ENV_RUN_ID]


def _launch(spec: JobSpec) -> Path:
    return spec.log.with_name("launch")


def _submit(spec: JobSpec) -> str:
    """Submits a batch job and returns its id."""
    script = _BATCH.format(shlex.quote(str(_launch(spec))))
    argv = ["sbatch", "--parsable", "--requeue", "--no-kill", *_size(spec), f"--output={_launch(spec)}-%j.log"]
    return ask(argv, given=script).strip().partition(";")[0]


def _size(spec: JobSpec) -> list[str]:
    minutes = math.ceil((spec.timeout_s + _SPARE_S) / 60)
    return [
        f"--nodes={spec.nodes}", "--ntasks-per-node=1", f"--time={minutes}", f"--job-name={spec.env[ENV_RUN_ID]}",
    ]  # fmt: skip
