"""The text of the drafted scenario."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from torchaos.harness.running.drafting.job import Draft
from torchaos.harness.running.planner.transport import OWN_STORE
from torchaos.harness.scenario.yaml_source import dumped

_ASSERTIONS = {
    "recovery_time": "{catch_up: 60s}",
    "loss_continuity": "",
    "sample_accounting": "",
    "state_restored": "",
    "no_lost_work": "",
    "checkpoint_integrity": "",
    "completed": "",
}
AFTER_A_LOOK = ("lr_continuity", "parameter_digest")  # judged only if a run has shown that they can be


def scenario_text(
    name: str, draft: Draft, step: int, timeout_s: float, blind: Mapping[str, str], more: Sequence[str] = ()
) -> str:  # fmt: skip
    """The text of the scenario file. `name`: the scenario's name; `step`: the step in which the rank dies. `blind`:
    assertions that see too little of this job, with the reason. `more`: assertions beside the usual ones."""
    rank = draft.ranks - 1
    job = [f"  command: {_one_line(_command(draft), flow=False)}"]
    if draft.cwd != ".":
        job.append(f"  cwd: {_one_line(draft.cwd)}")
    if draft.env:
        note = " # else torchrun's restarts under gloo often fail" if OWN_STORE in draft.env else ""
        job.append(f"  env: {{{', '.join(f'{name}: {_one_line(value)}' for name, value in draft.env.items())}}}{note}")
    if draft.checkpoints:
        job.append(f"  checkpoints: {{path: {_one_line(draft.checkpoints)}}}")
    if draft.nodes > 1:
        job.append(f"  nodes: {draft.nodes}")
    if draft.world_size:
        job.append(f"  world_size: {draft.world_size}")
    job.append(f"  timeout: {timeout_s:.0f}s # of one run")
    blind = blind if draft.checkpoints else {**blind, "checkpoint_integrity": "needs job.checkpoints.path"}
    judged = [
        _assertion(name, bounds, blind.get(name, ""))
        for name, bounds in [*_ASSERTIONS.items(), *((one, "") for one in more)]
    ]
    return "\n".join([
        f"scenario: {name}",
        "description: One rank dies without warning; only the steps since the last checkpoint may be lost.",
        *([f"launcher: {draft.launcher}"] if draft.launcher != "local" else []),
        "job:",
        *job,
        "faults:",
        "  - inject: process.kill",
        f"    target: {{rank: {rank}}}",
        f"    when: {{step: {step}, phase: backward}}",
        "assert:",
        *judged,
        "",
    ])  # fmt: skip


def _assertion(name: str, bounds: str, blind: str) -> str:
    whole = f"  - {name}: {bounds}" if bounds else f"  - {name}"
    return f"  # - {name} # {blind}" if blind else whole


def _command(draft: Draft) -> str | list[str]:
    """The command as text, if the text can be split into the same words again. Otherwise the list of words."""
    text = " ".join(draft.command)
    try:
        return text if shlex.split(text) == draft.command else draft.command
    except ValueError:
        return draft.command


def _one_line(value: str | list[str], flow: bool = True) -> str:
    """The value as YAML on one line. `flow`: whether it is between brackets or braces, where some characters need
    quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_one_line, value))}]"
    quoted = dumped([value])[2:].rstrip("\n")
    plain = "\n" not in quoted and not (flow and set(value) & set("{}[],#"))
    return quoted if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
