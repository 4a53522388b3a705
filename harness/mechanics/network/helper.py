"""A process that keeps a fault on, such as the packet queue or a flapping link. It is guarded before it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.machine.netspace import Space
from torchaos.harness.mechanics.network.link import Link
from torchaos.harness.undo.handles import JobProcesses
from torchaos.harness.undo.network import mark_of


@dataclass(frozen=True)
class Helper:
    """A process with its own mark in its environment. The mark begins with the run's id and differs from the mark of
    the job."""

    mark: str

    @property
    def handle(self) -> JobProcesses:
        return JobProcesses(self.mark)

    def start(self, space: Space | None, command: Sequence[str]) -> str:
        """Starts the helper in the network namespace `space`; if that is None, in the harness's namespace. Returns the
        helper's first line, which reports that it is ready. If the command is `sh`, returns an empty text without
        waiting. Raises OSError."""
        process = self.open(space, command)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip() if command[0] != "sh" else ""

    def open(self, space: Space | None, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the helper like `start`, for a caller that reads its output itself. Raises OSError."""
        return subprocess.Popen(
            space.enter(command) if space else list(command), cwd="/", start_new_session=True,
            env={**os.environ, ENV_RUN_ID: self.mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def helper_of(fault: str, link: Link) -> Helper:
    """The helper for one node that the fault hits."""
    return Helper(f"{link.run_id}.{mark_of(fault)}.{link.name}")
