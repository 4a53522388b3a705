"""The part of one node in a submission: its command, which may be started again, and the reader of its output."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_NODE, ENV_REPLICA
from torchaos.harness.contracts import JobSpec, Node
from torchaos.harness.machine.native import ENV_CONTROL
from torchaos.harness.running.launchers.command import Command, OnLine
from torchaos.harness.watching.probes.census import environ_of
from torchaos.harness.watching.probes.job_log import JobLog


@dataclass
class NodeRun:
    node: Node
    command: Command
    code: int | None = None  # None while it runs; negative: the signal's number
    expected: bool = False  # the command will be started again

    @property
    def over(self) -> bool:
        return self.code is not None and not self.expected


@dataclass(frozen=True)
class LiveNode:
    """A node of the running job; implements contracts.LiveNode."""

    node: Node
    run_id: str
    members: Callable[[], Mapping[int, int]]
    again: Callable[[int], int]
    expect: Callable[[int], None]

    def processes(self) -> dict[int, int]:
        here = _place(self.node.env)
        return {pid: ticks for pid, ticks in self.members().items() if _place(environ_of(pid)) == here}

    def start_again(self) -> int:
        return self.again(self.node.index)

    def keep_place(self) -> None:
        self.expect(self.node.index)


def _place(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    return env.get(ENV_NODE), env.get(ENV_REPLICA)


def start(node: Node, spec: JobSpec, base: int, log: JobLog, on_line: OnLine | None = None) -> NodeRun:
    """Starts the command on a node. `on_line`: receives the lines of the output; if None, `log` does. Raises UsageError
    if the command can't be started."""
    log.begin(base)
    spec = for_node(node, spec, base)
    return NodeRun(node, Command(node.argv(spec.argv), spec.cwd, spec.env, spec.log, on_line or log.line))


def for_node(node: Node, spec: JobSpec, base: int) -> JobSpec:
    """The spec of a node. Each node but the first has a log of its own. Each node has a folder of its own for the
    orders to the NVML overlay (the library that changes what NVML reports), because GPUs are numbered from 0 on each
    node."""
    env = {**spec.env, **node.env, ENV_ATTEMPT_BASE: str(base)}
    if ENV_NODE in env and (control := Path(env.get(ENV_CONTROL, os.devnull))).is_dir():
        own = control / f"node{node.index}"
        own.mkdir(exist_ok=True)
        env[ENV_CONTROL] = str(own)
    log = spec.log if node.index == 0 else spec.log.with_name(f"{spec.log.stem}.node{node.index}{spec.log.suffix}")
    return replace(spec, env=env, log=log)
