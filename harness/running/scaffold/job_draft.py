"""Turns a command line, as a user types it, into the job of a scenario and into the text of the scenario file.
`read_script` finds facts in the text of the training script; no code of the script is run."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchaos.harness.running.launchers.torchrun_line import NO_SCRIPT, own_part, restarts_of, script_of, world_of
from torchaos.harness.running.planner.fault_plans import OWN_STORE
from torchaos.harness.running.scaffold.batch_script import with_option
from torchaos.harness.running.scaffold.launch_line import launch_of
from torchaos.harness.scenario.field_types import with_braces_doubled
from torchaos.harness.scenario.loader import checkpoints_in
from torchaos.harness.scenario.yaml_source import dumped

# If a script imports several of these packages, the first in this order counts.
FRAMEWORKS = {
    "megatron": "Megatron-LM", "torchtitan": "TorchTitan", "deepspeed": "DeepSpeed", "lightning": "Lightning",
    "pytorch_lightning": "Lightning", "transformers": "Hugging Face Trainer", "accelerate": "Accelerate",
    "torch": "a plain PyTorch loop",
}  # fmt: skip
# Not torch.Generator().manual_seed, which sets the seed of one generator only.
_SEEDS = re.compile(r"(torch\.(cuda\.|random\.)?)?manual_seed(_all)?|(.*\.)?(seed_everything|set_seed|random\.seed)")
_LOADS = re.compile(
    r"(^|\.)(torch\.load|\w*load_checkpoint|load_state|load_file|load_model|dcp\.load|checkpoint\.load)$"
)
# Calls that may fix the seed or load a checkpoint; only a run shows whether they do.
_PERHAPS_SEEDS = re.compile(r"(.*\.)?\w*seed\w*", re.IGNORECASE)
_PERHAPS_LOADS = re.compile(r"(.*\.)?(load|load_state_dict|\w*restore\w*|\w*resume\w*|load_latest\w*|maybe_load\w*)")
_OTHER_LOADS = re.compile(
    r"(json|yaml|toml|tomllib|np|numpy|pickle|OmegaConf|csv|cpp_extension|datasets|librosa)\.load"
)
_RESUMES = frozenset({"resume_from_checkpoint", "ckpt_path"})  # keyword arguments of frameworks
_MOST_BYTES, _MOST_FILES = 1 << 20, 20


@dataclass
class Script:
    """The facts about a training script, each with its place, such as `train.py:12`."""

    path: Path
    files: list[str] = field(default_factory=list)  # the files that were read
    imports: set[str] = field(default_factory=set)  # the top-level packages
    options: dict[str, str] = field(default_factory=dict)  # options of the script's command line, such as --dir
    seeds: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    perhaps_seeds: list[str] = field(default_factory=list)  # such as `seed` in a call
    perhaps_loads: list[str] = field(default_factory=list)
    words: set[str] = field(default_factory=set)  # short strings in the code, such as nccl
    unread: str = ""  # why the script could not be read

    @property
    def framework(self) -> str:
        """The name of the framework. Empty if the script imports no known framework."""
        return next((name for package, name in FRAMEWORKS.items() if package in self.imports), "")


def read_script(path: Path) -> Script:
    """The facts about the script and about the modules in its folder that it imports."""
    script, waiting = Script(path), [path]
    while waiting and len(script.files) < _MOST_FILES:
        file = waiting.pop(0)
        if file.name in script.files:
            continue
        try:
            tree = ast.parse(file.read_bytes()[:_MOST_BYTES])
        except (OSError, SyntaxError, ValueError) as error:
            script.unread = script.unread or f"{file.name} can't be read: {error}"
            continue
        script.files.append(file.name)
        waiting += [path.parent / f"{name}.py" for name in _of_tree(tree, file.name, script)]
        waiting = [module for module in waiting if module.is_file()]
    return script


def _of_tree(tree: ast.AST, file: str, script: Script) -> set[str]:
    """Adds the facts in a parsed file to `script`. Returns the names of the modules that the file imports."""
    imported = set(_imported(tree))
    script.imports |= imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
            script.words.add(node.value)
        if isinstance(node, ast.Call):
            _of_call(node, f"{file}:{node.lineno}", script)
    return imported


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _of_call(node: ast.Call, place: str, script: Script) -> None:
    name = ast.unparse(node.func)
    if name.endswith("add_argument"):
        texts = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
        script.options |= {text: place for text in texts if isinstance(text, str) and text.startswith("--")}
    if _SEEDS.fullmatch(name):
        script.seeds.append(f"{name} ({place})")
    elif any(argument.arg in ("seed", "random_state") and not _is_none(argument.value) for argument in node.keywords):
        script.perhaps_seeds.append(f"seed in {name}(...) ({place})")
    elif _PERHAPS_SEEDS.fullmatch(name) and not name.endswith("manual_seed"):
        script.perhaps_seeds.append(f"{name} ({place})")
    if _LOADS.search(name) or _RESUMES & {argument.arg for argument in node.keywords}:
        script.loads.append(f"{name} ({place})")
    elif _PERHAPS_LOADS.fullmatch(name) and not _OTHER_LOADS.fullmatch(name):
        script.perhaps_loads.append(f"{name} ({place})")


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


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
    nodes: int = 0  # 0: as the command says, or one
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
    """The draft for a command that the user typed in the folder `cwd`."""
    launch = launch_of(command, cwd, env)
    draft = Draft(launch.words, launcher=launch.launcher, nodes=launch.nodes, env=launch.adds)
    draft.allocation, draft.assumed, draft.to_check = launch.allocation, launch.assumed, launch.to_check
    cwd = cwd / launch.folder
    draft.cwd = str(cwd)
    if unknown := sorted({one for word in draft.command for one in _VARIABLE.findall(word)}):
        draft.to_check.append(f"no shell fills in {', '.join(unknown).replace('{', '')}; write the values")
    _ranks(draft, env)
    _restarts(draft, env)
    name = script_of(draft.command)
    if name and "{" not in name:
        draft.script = read_script(cwd / name)
        _says(draft, draft.script)
    elif name is None and own_part(draft.command) and NO_SCRIPT.isdisjoint(draft.command):
        draft.to_check.append("no script was found behind torchrun's options; write it into the command")
    _folder(draft)
    words = draft.script.words if draft.script else set()
    if "nccl" not in words or "gloo" in words:
        draft.env[OWN_STORE] = "1"
        draft.to_check.append(
            f"{OWN_STORE}=1: torchrun's restarts under gloo often fail without it; remove it if you use NCCL"
        )
    return draft


_VARIABLE = re.compile(r"\$\w+|\$\{\w+(?=\}|:?[-=?+]|[%#/^,[]|:\d)")  # of a shell, not `${now:%Y}` of a configuration
_COUNT = re.compile(r" --(?:nproc[-_]per[-_]node|num[-_]processes|nproc|devices)[ =](\d+)(?= |$)")  # of other launchers


def _ranks(draft: Draft, env: Mapping[str, str]) -> None:
    per_node, nodes = world_of(draft.command, env)
    if per_node:
        draft.ranks = per_node * (draft.nodes or nodes or 1)
    elif own_part(draft.command) is None:
        said = _COUNT.search(shlex.join(draft.command))
        draft.ranks = int(said[1]) if said else draft.ranks
        draft.world_size = draft.ranks
        draft.to_check.append(
            f"job.world_size: {draft.ranks} is a guess, "
            + (f"by{said[0]}" if said else "nothing shows the number of ranks")
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
    """Makes the job save its checkpoints below {run}: by an option that is in the command, otherwise by an option of
    the script."""
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


_ASSERTIONS = {
    "recovery_time": "{catch_up: 60s}",
    "loss_continuity": "",
    "sample_accounting": "",
    "state_restored": "",
    "no_lost_work": "",
    "checkpoint_integrity": "",
    "completed": "",
}
AFTER_A_LOOK = ("lr_continuity", "parameter_digest")
UNKNOWN = "only a run shows whether the data can be seen"  # why these are comments until a run has shown it


def scenario_text(
    name: str, draft: Draft, step: int, timeout_s: float, blind: Mapping[str, str] | None = None
) -> str:  # fmt: skip
    """The text of the scenario file. `name`: the scenario's name. `step`: the step in which the rank dies. `blind`: the
    assertions that see too little of this job, each with the reason; None if no run of the job was observed."""
    blind = dict.fromkeys(AFTER_A_LOOK, UNKNOWN) if blind is None else blind
    rank = draft.ranks - 1
    job = [f"  command: {_one_line(_command(draft), flow=False)}"]
    if draft.cwd != ".":
        job.append(f"  cwd: {_one_line(with_braces_doubled(draft.cwd))}")
    if draft.env:
        note = " # else torchrun's restarts under gloo often fail" if OWN_STORE in draft.env else ""
        values = {name: _one_line(with_braces_doubled(value)) for name, value in draft.env.items()}
        job.append(f"  env: {{{', '.join(map(': '.join, values.items()))}}}{note}")
    if draft.checkpoints:
        job.append(f"  checkpoints: {{path: {_one_line(with_braces_doubled(draft.checkpoints))}}}")
    if draft.nodes > 1:
        job.append(f"  nodes: {draft.nodes}")
    if draft.world_size:
        job.append(f"  world_size: {draft.world_size}")
    job.append(f"  timeout: {timeout_s:.0f}s # of one run")
    blind = blind if draft.checkpoints else {**blind, "checkpoint_integrity": "needs job.checkpoints.path"}
    judged = [
        _assertion(name, bounds, blind.get(name, ""))
        for name, bounds in [*_ASSERTIONS.items(), *((one, "") for one in AFTER_A_LOOK)]
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
    """The command as one text, if that can be split into the same words again. Otherwise the list of words."""
    words = list(map(with_braces_doubled, draft.command))
    text = " ".join(words)
    try:
        return text if shlex.split(text) == words else words
    except ValueError:
        return words


def _one_line(value: str | list[str], flow: bool = True) -> str:
    """The value as YAML on one line. `flow`: it stands between brackets or braces, where some characters need
    quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_one_line, value))}]"
    quoted = dumped([value])[2:].rstrip("\n")
    plain = "\n" not in quoted and not (flow and set(value) & set("{}[],#"))
    return quoted if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
