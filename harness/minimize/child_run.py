"""Runs one scenario by the command line, in its own process, so that its memory is freed when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchaos.harness.host.processes import wait_for
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.record.result import ExitCode, Result
from torchaos.harness.record.rundir import results_in
from torchaos.harness.scenario.yaml_source import dumped

JUDGED = (ExitCode.PASSED, ExitCode.FAILED, ExitCode.INCONCLUSIVE)


@dataclass(frozen=True)
class Ran:
    code: int
    result: Result


class Child:
    """Runs one scenario at a time. A signal handler may call `stop`: then the run is ended normally, and judged."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = ""

    def stop(self, reason: str) -> None:
        """Ends the run normally. After a second call, the job gets no grace period."""
        self.stopped = self.stopped or reason
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def hurry(self, reason: str) -> None:
        self.stop(reason)

    def run(
        self, scenario: dict[str, Any], home: Path, seed: int, consent: Sequence[str], fds: Sequence[int] = ()
    ) -> Ran:
        """Runs the scenario in the new folder `home`, which gets scenario.yaml, console.log, results.json, and the run
        directory in run/. `fds`: file descriptors that the process also keeps open. Raises ChaosError if the run left
        no result."""
        home.mkdir(parents=True, mode=0o700)
        path = home / "scenario.yaml"
        path.write_text(dumped(scenario))
        consents = (word for name in consent for word in ("--consent", name))
        return self.call([str(path), "--seed", str(seed), *consents], home, fds)

    def call(self, words: Sequence[str], home: Path, fds: Sequence[int] = ()) -> Ran:
        """Runs `torchaos run` with these words; returns what `run` returns."""
        home.mkdir(parents=True, mode=0o700, exist_ok=True)
        command = [
            sys.executable, "-m", "torchaos.harness", "run", "--out", str(home / "run"),
            "--json", str(home / "results.json"), *words,
        ]  # fmt: skip
        with open(home / "console.log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=tuple(fds),
                start_new_session=True,
            )  # fmt: skip
            if self.stopped:
                self.stop(self.stopped)
            code = wait_for(self._process)
        return Ran(code, _result(home))


def _result(home: Path) -> Result:
    try:
        return results_in(home / "results.json")[0]
    except (OSError, IndexError, UsageError) as error:
        told = (home / "console.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise ChaosError(f"{home}: the run left no result: {told[0] if told else error}") from error
