"""Turns a command line, as a user types it, into the job of a scenario, and lists the assumptions and the points to
check."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchaos.harness.running.drafting.heads import with_option
from torchaos.harness.running.drafting.launch import launch_of
from torchaos.harness.running.drafting.script import Script, read_script
from torchaos.harness.running.launchers.torchrun_line import own_part, restarts_of, script_of, world_of
from torchaos.harness.running.planner.transport import OWN_STORE
from torchaos.harness.scenario.other_job import checkpoints_in

CHECKPOINTS = "{run}/checkpoints"
EXAMPLE = ("torchrun", "--nproc-per-node", "2", "--max-restarts", "3", "train.py", "--dir", CHECKPOINTS)
_FOLDER = re.compile(
    r"--((checkpoint|ckpt|chkpt|save|output|out|work|default[-_]root)s?([-_]?(dir|path|folder|root|directory))?|dir)s?"
)
_WITH_SEED = "Hugging Face Trainer"  # its default is 42


@dataclass
class Draft:
    command: list[str]
    cwd: str = "."  # in the scenario: relative to its folder
    launcher: str = "local"
    nodes: int = 0  # 0: the command says it, or there is one
    allocation: list[str] = field(default_factory=list)  # variables for salloc
    env: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None  # must be written into the scenario, because the command does not show it
    ranks: int = 2
    script: Script | None = None
    assumed: list[str] = field(default_factory=list)
    to_check: list[str] = field(default_factory=list)

    @property
    def checkpoints(self) -> str | None:
        return checkpoints_in(self.command)


def draft_of(command: Sequence[str], cwd: Path, env: Mapping[str, str] = os.environ) -> Draft:
    """The draft for a command that the user types in the folder `cwd`."""
    launch = launch_of(command, cwd, env)
    draft = Draft(launch.words, launcher=launch.launcher, nodes=launch.nodes, env=launch.adds)
    draft.allocation, draft.assumed, draft.to_check = launch.allocation, launch.assumed, launch.to_check
    cwd = cwd / launch.folder
    draft.cwd = str(cwd)
    if unknown := sorted({one for word in draft.command for one in re.findall(r"\$\w+|\$\{\w+", word)}):
        draft.to_check.append(f"no shell fills in {', '.join(unknown).replace('{', '')}; write the values")
    _ranks(draft, env)
    _restarts(draft, env)
    name = script_of(draft.command)
    if name and "{" not in name:
        draft.script = read_script(cwd / name)
        _says(draft, draft.script)
    _folder(draft)
    words = draft.script.words if draft.script else set()
    if "nccl" not in words or "gloo" in words:
        draft.env[OWN_STORE] = "1"
        draft.to_check.append(
            f"{OWN_STORE}=1: torchrun's restarts under gloo often fail without it; remove it if you use NCCL"
        )
    return draft


def _torchrun_in(command: Sequence[str]) -> int | None:
    """The index of the word torchrun, or of its module. None if there is none."""
    known = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
    return next((place for place, word in enumerate(command[:4]) if word.endswith(known)), None)


def _ranks(draft: Draft, env: Mapping[str, str]) -> None:
    per_node, nodes = world_of(draft.command, env)
    if per_node:
        draft.ranks = per_node * (draft.nodes or nodes or 1)
    elif _torchrun_in(draft.command) is None:
        draft.world_size = draft.ranks
        draft.to_check.append(
            f"job.world_size: {draft.ranks} is a guess, the command does not show the number of ranks"
        )
    if draft.ranks == 1:
        draft.to_check.append(
            "the job has one rank; with --nproc-per-node 2 another rank notices its death, as in production"
        )


def _restarts(draft: Draft, env: Mapping[str, str]) -> None:
    if restarts_of(draft.command, env) == 0:
        begin, end = own_part(draft.command) or (1, 1)
        was = len(draft.command)
        draft.command = with_option(draft.command, begin, end, "max-restarts", "3")
        how = "was added" if len(draft.command) == was + 2 else "took the place of 0"
        draft.assumed.append(f"torchrun starts the ranks again after a death: --max-restarts 3 {how}")


def _says(draft: Draft, script: Script) -> None:
    name = script.path.name
    if script.unread:
        draft.to_check.append(script.unread)
    if script.framework:
        draft.assumed.append(f"{name} is {script.framework}, by its imports")
    if script.seeds:
        draft.assumed.append(f"the seed is fixed, by {script.seeds[0]}")
    elif script.framework == _WITH_SEED:
        draft.to_check.append(
            f"no seed was found in {name}: Trainer sets one when it is made, so a model that was made before, from "
            "random weights, is another in each run; call set_seed first"
        )
    elif script.perhaps_seeds:
        draft.to_check.append(f"does {script.perhaps_seeds[0]} fix the weights and the dropout in each rank?")
    elif not script.unread:
        draft.to_check.append(
            f"no seed was found in {name}: without a fixed seed, no loss can be compared with a run without faults"
        )
    if script.loads:
        draft.assumed.append(f"it resumes by itself, by {script.loads[0]}")
    elif script.perhaps_loads:
        draft.to_check.append(f"does it resume by itself, by {script.perhaps_loads[0]}? If not, it begins anew")
    elif not script.unread:
        draft.to_check.append(f"no load of a checkpoint was found in {name}: after a restart it would begin anew")


def _folder(draft: Draft) -> None:
    """Makes the job save its checkpoints below {run}: by an option in the command, otherwise by an option of the
    script."""
    if any("{run}" in word for word in draft.command):
        if draft.checkpoints:
            draft.assumed.append(f"checkpoints are in {draft.checkpoints}, as the command says")
        return
    words = draft.command
    for place, word in sorted(enumerate(words), key=lambda pair: _likely(pair[1])):
        option, equals, value = word.partition("=")
        if not _FOLDER.fullmatch(option):
            continue
        if equals:
            words[place] = f"{option}={CHECKPOINTS}"
        elif place + 1 < len(words) and not words[place + 1].startswith("-"):
            value, words[place + 1] = words[place + 1], CHECKPOINTS
        else:
            continue
        draft.assumed.append(f"checkpoints go to the folder of {option}: {value} became {CHECKPOINTS}, new in each run")
        return
    options = draft.script.options if draft.script else {}
    found = [option for option in options if _FOLDER.fullmatch(option)]
    own = "--output_dir" if draft.script and draft.script.framework == _WITH_SEED else None
    if chosen := next(iter(sorted(found, key=_likely)), own):
        words += [chosen, CHECKPOINTS]
        by = options.get(chosen, "of the Trainer")
        draft.assumed.append(f"checkpoints go to the folder of {chosen} ({by}), which was added: {CHECKPOINTS}")
    else:
        problem = "nothing shows where the job saves its checkpoints: it may resume from those of an earlier run"
        draft.to_check.append(f"{problem}; name a folder below {{run}} in the command or in job.env")


def _likely(option: str) -> bool:
    return not re.search("checkpoint|ckpt|save", option)
