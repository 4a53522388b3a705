"""Finds facts about the job in the text of its training script. No code of the script is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# If a script imports several of these packages, the first in this order counts.
FRAMEWORKS = {
    "megatron": "Megatron-LM", "torchtitan": "TorchTitan", "deepspeed": "DeepSpeed", "lightning": "Lightning",
    "pytorch_lightning": "Lightning", "transformers": "Hugging Face Trainer", "accelerate": "Accelerate",
    "torch": "a plain PyTorch loop",
}  # fmt: skip
# Not the seed of a generator of its own, such as torch.Generator().manual_seed.
_SEEDS = re.compile(r"(torch\.(cuda\.|random\.)?)?manual_seed(_all)?|(.*\.)?(seed_everything|set_seed|random\.seed)")
_LOADS = re.compile(
    r"(^|\.)(torch\.load|\w*load_checkpoint|load_state|load_file|load_model|dcp\.load|checkpoint\.load)$"
)
# Calls that may fix the seed, or load a checkpoint: only a run shows it.
_PERHAPS_SEEDS = re.compile(r"(.*\.)?\w*seed\w*", re.IGNORECASE)
_PERHAPS_LOADS = re.compile(r"(.*\.)?(load|load_state_dict|\w*restore\w*|\w*resume\w*|load_latest\w*|maybe_load\w*)")
_OTHER_LOADS = re.compile(
    r"(json|yaml|toml|tomllib|np|numpy|pickle|OmegaConf|csv|cpp_extension|datasets|librosa)\.load"
)
_RESUMES = frozenset({"resume_from_checkpoint", "ckpt_path"})  # keyword arguments of frameworks
_MOST_BYTES, _MOST_FILES = 1 << 20, 20


@dataclass
class Script:
    """The facts about a training script, with places such as `train.py:12`."""

    path: Path
    files: list[str] = field(default_factory=list)  # the files that were read
    imports: set[str] = field(default_factory=set)  # the top-level packages
    options: dict[str, str] = field(default_factory=dict)  # options of the script's command line, such as --dir
    seeds: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    perhaps_seeds: list[str] = field(default_factory=list)  # such as `seed` in a call
    perhaps_loads: list[str] = field(default_factory=list)
    words: set[str] = field(default_factory=set)  # texts, such as nccl
    unread: str = ""  # why the script could not be read

    @property
    def framework(self) -> str:
        """The framework in words. Empty if the script imports no known framework."""
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
