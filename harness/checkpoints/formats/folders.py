"""Folders of files that together are one checkpoint: Transformers' `checkpoint-N/`, Accelerate's `checkpoint_N/`,
DeepSpeed's `global_stepN/`, Megatron's `iter_N/`, sharded safetensors with an index, and whatever else has a number in
its name.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any

from ..contents import Contents
from ..files import Files
from ..layout import Checkpoint, File, Problem, Trouble, Unreadable
from . import dcp, dcp_safetensors, deepspeed, megatron, safetensors, torch_save
from .names import NUMBERED, is_torch

_JSON = 1 << 26
_OF = re.compile(r"^(?P<head>.+-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<tail>\.\w+)$")
_RANKED = re.compile(r"^(rng_state|random_states)_(\d+)\.(pth|pkl)$")


def form_of(names: list[str], folder: str) -> str | None:
    """Which kind of folder it is, by the names in it."""
    have = set(names)
    if megatron.is_megatron(names, folder):
        return "megatron"
    if ".metadata" in have or any(name.endswith(".distcp") for name in have):
        return "dcp"
    if any(map(dcp_safetensors.PART.match, names)):
        return "dcp_safetensors"
    if "trainer_state.json" in have:
        return "huggingface"
    if any(name.startswith("random_states_") and name.endswith(".pkl") for name in have):
        return "accelerate"
    if deepspeed.is_deepspeed(names):
        return "deepspeed"
    if any(name.endswith((".safetensors.index.json", ".bin.index.json")) for name in have):
        return "sharded"
    return "dir" if NUMBERED.search(posixpath.basename(folder)) else None


def read_folder(files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
    """All that is in it, folders in it too. What goes wrong in one file is noted, and the others are still read."""
    names = files.names(folder)
    if ".metadata" in names:
        dcp.read_folder(files, folder, into, prefix)
    parts = [name for name in names if dcp_safetensors.PART.match(name)]
    dcp_safetensors.read_parts(files, folder, parts, into, prefix)
    for name in names:
        if name in parts:
            continue
        path = f"{folder}/{name}"
        try:
            if files.is_dir(path):
                read = dcp.read_folder if form_of(files.names(path), path) == "dcp" else read_folder
                read(files, path, into, f"{prefix}{name}/")
            else:
                _read_file(files, path, into, prefix, name)
        except (Unreadable, OSError) as error:
            into.problems.append(problem_of(error, prefix + name, path))
    _check_sets(files, folder, names, into, prefix)


def problem_of(error: Exception, what: str, path: str) -> Problem:
    if isinstance(error, Unreadable):
        return Problem(error.kind, f"{what}: {error}", path)
    gone = isinstance(error, FileNotFoundError)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Problem(Trouble.TORN if gone else Trouble.UNREADABLE, f"{what}: {text}", path)


def _read_file(files: Files, path: str, into: Checkpoint, prefix: str, name: str) -> None:
    if is_torch(name):
        torch_save.read_file(files, path, files.size(path), into, f"{prefix}{name}:")
    elif name.endswith(".safetensors"):
        safetensors.read_file(files, path, files.size(path), into, f"{prefix}{name}:")
    elif name.endswith(".json"):
        values = read_json(files, path)
        plain = {key: value for key, value in values.items() if not isinstance(value, (dict, list))}
        Contents(into.values, into.tensors, into.opaque).add(f"{prefix}{name}:", plain, lambda _name, _ref: None)


def read_json(files: Files, path: str) -> dict[str, Any]:
    """Raises Unreadable."""
    size = files.size(path)
    if size > _JSON:
        raise Unreadable(f"{size} bytes of JSON, more than are read", Trouble.LIMIT)
    try:
        found = json.loads(files.read(path, 0, size).decode())
    except (ValueError, RecursionError) as error:
        kind = Trouble.UNREADABLE if size else Trouble.TORN
        raise Unreadable(f"no JSON: {str(error)[:100]}", kind) from error
    if not isinstance(found, dict):
        raise Unreadable("no JSON object")
    return found


def _check_sets(files: Files, folder: str, names: list[str], into: Checkpoint, prefix: str) -> None:
    """Files that come in sets, of which none may be missing."""
    have = set(names)
    for name in names:
        whole = _OF.match(name)
        if whole:
            _lacks(into, prefix, [f"{whole['head']}{n:05}-of-{whole['count']}{whole['tail']}"
                                  for n in range(1, min(int(whole["count"]), 9999) + 1)], have)  # fmt: skip
        if name.endswith(".index.json"):
            _check_index(files, folder, name, have, into, prefix)
    if deepspeed.is_deepspeed(names):
        deepspeed.check(names, into, prefix)
    if megatron.is_megatron(names, folder):
        megatron.check(names, into, prefix)
    found = [match.groups() for match in map(_RANKED.match, names) if match]
    ranks = sorted({int(rank) for _, rank, _ in found})
    if found and len(ranks) < ranks[-1] + 1 <= 100_000:
        head, _, tail = found[0]
        for rank in sorted(set(range(ranks[-1] + 1)) - set(ranks)):
            text = f"{prefix}{head}_{rank}.{tail}: missing, and those of later ranks are there"
            into.problems.append(Problem(Trouble.TORN, text))


def _lacks(into: Checkpoint, prefix: str, wanted: list[str], have: set[str]) -> None:
    for name in wanted:
        text = f"{prefix}{name}: missing"
        if name not in have and all(one.text != text for one in into.problems):
            into.problems.append(Problem(Trouble.TORN, text))


def _check_index(files: Files, folder: str, name: str, have: set[str], into: Checkpoint, prefix: str) -> None:
    """Every tensor of an index is in the file that it names."""
    try:
        weights = read_json(files, f"{folder}/{name}").get("weight_map")
    except (Unreadable, OSError):
        return  # noted where the file itself was read
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        into.problems.append(Problem(Trouble.UNREADABLE, f"{prefix}{name}: it has no weight_map", f"{folder}/{name}"))
        return
    _lacks(into, prefix, sorted(set(weights.values())), have)
    for tensor, file in weights.items():
        if file in have and f"{prefix}{file}:{tensor}" not in into.tensors:
            text = f"{prefix}{file}: it lacks {tensor}, which {name} says is in it"
            into.problems.append(Problem(Trouble.TORN, text, f"{folder}/{file}", tensor))
            return


def all_files(files: Files, path: str) -> list[File]:
    """Every file of a checkpoint, with its size; links that lead nowhere have none."""
    if not files.is_dir(path):
        return [File(path, files.size(path), _role(path))]
    found: list[File] = []
    for name in files.names(path):
        inner = f"{path}/{name}"
        try:
            found += all_files(files, inner)
        except OSError:
            found.append(File(inner, 0, _role(inner)))
    return found


def _role(path: str) -> str:
    name = posixpath.basename(path)
    if name == ".metadata" or name.endswith(".json"):
        return "metadata"
    return "data" if is_torch(name) or name.endswith((".safetensors", ".distcp")) else "other"
