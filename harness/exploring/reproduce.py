"""A shell script that starts the job on the files that a death left, without torchaos."""

from __future__ import annotations

import shlex
from pathlib import Path

from torchaos.harness.exploring.outcomes import Outcome
from torchaos.harness.exploring.store.stored import store_in_shell
from torchaos.harness.record.plan import PlannedJob
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.secrecy import mask_env, mask_words

NAME, STATE = "reproduce.sh", "state"


def script_of(job: PlannedJob, now: RunDir, checkpoints: Path, outcome: Outcome) -> str:
    """The script. It is for the folder that contains STATE. `now`, `checkpoints`: the folder in which the job ran, and
    its checkpoint folder there; the files may contain this path."""

    def filled(text: str) -> str:
        """The text with `$run` in place of `{run}`."""
        return '"$run"'.join(shlex.quote(part) if part else "" for part in text.split("{run}")) or "''"

    stored, variables = store_in_shell(job.env)
    env = [f"export {name}={filled(value)}" for name, value in mask_env(variables).items()]
    lines = [
        "#!/bin/sh",
        f"# The job dies at step {outcome.died_at_step} ({outcome.model}), and is started again on what is left:",
        f"# {outcome.kind.value}: {' '.join(outcome.reason.split())}"[:500],
        "# RUN: an empty or missing folder for the job; by default the one in which it was recorded, which is emptied.",
        "set -eu",
        'here=$(cd "$(dirname "$0")" && pwd)',
        f"run=${{RUN:-{shlex.quote(str(now.job))}}}",
        '[ -n "${RUN:-}" ] || rm -rf "$run"',
        f'checkpoints="$run"/{shlex.quote(str(checkpoints.relative_to(now.job)))}',
        'mkdir -p "$checkpoints"',
        f'cp -a "$here/{STATE}/." "$checkpoints/"',
        *stored,
        *env,
        f"cd {filled(job.cwd)}",
        f"{'' if stored else 'exec '}{' '.join(map(filled, mask_words(job.command)))}",
    ]
    return "\n".join(lines) + "\n"
