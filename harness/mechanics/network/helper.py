"""A process that keeps a fault going: the packet queue, a link that flaps. It is guarded before it is started."""

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
    """Known by its mark, which no other process has. It begins with the run's id, and differs from the job's own."""

    mark: str

    @property
    def handle(self) -> JobProcesses:
        return JobProcesses(self.mark)

    def start(self, space: Space | None, command: Sequence[str]) -> str:
        """In a network namespace, or (None) in the harness's own. Returns the first line that the command prints, by
        which it says that it is ready; a shell prints none. Raises OSError."""
        process = subprocess.Popen(
            space.enter(command) if space else list(command), cwd="/", start_new_session=True,
            env={**os.environ, ENV_RUN_ID: self.mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        return process.stdout.readline().decode().strip() if command[0] != "sh" else ""


def helper_of(fault: str, link: Link) -> Helper:
    """One for each node that the fault hits."""
    return Helper(f"{link.run_id}.{mark_of(fault)}.{link.name}")
