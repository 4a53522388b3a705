"""The files and folders that training frameworks write: Accelerate, Transformers, Lightning, DeepSpeed, Megatron-LM,
nanotron and verl. And folders that belong to no other format: with an index, `model.safetensors.index.json`, that names
the file of each tensor, with numbered files, or with a step in their names, such as `step-10/`, whose files are read
one by one.

Lightning's `.ckpt` is a torch.save file with the keys of lightning's dump_checkpoint.

DeepSpeed's folders `global_stepN/`: the sizes in a ZeRO checkpoint's own files show which files it must have. With
deepspeed 0.19.8, these are `mp_rank_00_model_states.pt` (ZeRO-3: `zero_pp_rank_0_mp_rank_00_model_states.pt`), and
`[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt` for each rank of data parallelism and each rank of model parallelism.
Each expert has a file of its own, and `expp_rank_0_mp_rank_00_optim_states.pt` belongs to the experts. Source:
deepspeed/runtime/engine.py, _save_moe_checkpoint.

Megatron-LM's folders `iter_0000020/`, beside `latest_checkpointed_iteration.txt`: in the form torch_dist, such a folder
is a folder of torch.distributed.checkpoint, with the unsharded data in `common.pt`, and with `metadata.json`. In the
form torch, it contains a folder `mp_rank_00[_000]` for each rank of tensor (and pipeline) parallelism. Each holds
`model_optim_rng.pt`, and also `distrib_optim.pt` if the optimizer is distributed. Source: Megatron-LM's
megatron/training/checkpointing.py and, in megatron-core 0.16.1, core/dist_checkpointing.

nanotron's folders, whose names are the step alone (`10/`), beside `latest.txt`: a sharded weight has a safetensors file
for each rank of tensor parallelism, `..._pp-rank-0-of-1_tp-rank-0-of-2`; a weight belongs to one rank of pipeline
parallelism. The optimizer and the generators have a file for each rank, such as
`optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt`. `checkpoint_metadata.json` is written last. Source: nanotron's
src/nanotron/serialize/.

verl's folders `global_step_10/`, with a folder for each model that is trained (`actor/`, `critic/`), beside
`latest_checkpointed_iteration.txt`: with FSDP, each rank writes `model_world_size_2_rank_0.pt`, and the same for
`optim` and `extra_state`. With Megatron, `actor/dist_ckpt/` is a folder of torch.distributed.checkpoint. Source:
verl/utils/checkpoint/fsdp_checkpoint_manager.py and, for `data.pt` and the tracker, verl/trainer/ppo/ray_trainer.py."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble, Unreadable
from .dcp import METADATA
from .format import NUMBERED, Format, check_ranks, note_missing, read_json
from .torch_save import TorchSave

_ACCELERATE_RANKED = re.compile(r"^(?P<head>random_states_)(?P<rank>\d+)(?P<tail>\.pkl)$")


class Accelerate(Format):
    """The folders of Accelerate's save_state."""

    name = "accelerate"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"\.safetensors$|^(model|pytorch_model).*\.bin$|^pytorch_model(_\w+)?/",
        "the optimizer's state": r"^optimizer(_\d+)?\.bin$|^optimizer_\d+/|^pytorch_model(_\d+)?/",
        "the state of the random number generators": r"^random_states_\d+\.pkl$",
    }

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(name.startswith("random_states_") and name.endswith(".pkl") for name in names)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        check_ranks(_ACCELERATE_RANKED, names, into, prefix)


_HUGGINGFACE_FOLDER, _STATE = re.compile(r"(^|/)checkpoint-\d+/?$"), "trainer_state.json"
_EARLIER = frozenset({"training_args.bin", "scheduler.pt"})  # the Trainer writes them before trainer_state.json
_HUGGINGFACE_RANKED = re.compile(r"^(?P<head>rng_state_)(?P<rank>\d+)(?P<tail>\.pth)$")


class HuggingFace(Format):
    """The folders of Transformers' Trainer."""

    name = "huggingface"
    asked = 40
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"^(model|pytorch_model|adapter_model).*\.(safetensors|bin)$|^(global_step|pytorch_model_fsdp)",
        "the optimizer's state": r"^optimizer.*\.(pt|bin)$|^optimizer_\d+/|global_step",
        "the learning rate schedule": r"^scheduler\.pt$",
        "the state of the random number generators": r"^rng_state(_\d+)?\.pth$",
        "how far training was": r"^trainer_state\.json$",
    }

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        unfinished = _HUGGINGFACE_FOLDER.search(folder) and not _EARLIER.isdisjoint(names)
        return _STATE in names or bool(unfinished)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            note_missing(into, prefix, [_STATE], set(names))
        check_ranks(_HUGGINGFACE_RANKED, names, into, prefix)


class Lightning(Format):
    """Lightning's `.ckpt` files."""

    name = "lightning"
    needed_entries: ClassVar[Mapping[str, str]] = {
        "the model": r"^state_dict\.",
        "the optimizer's state": r"^optimizer_states\.",
        "how far training was": r"^global_step$",
        "the state of the loops": r"^loops\.",
    }

    def refines(self, found: Checkpoint) -> bool:
        return found.format == TorchSave.name and "pytorch-lightning_version" in found.values


_DEEPSPEED_OF_RANK = re.compile(
    r"^(?P<head>(?:bf16_|fp16_)?zero_pp_rank_)(?P<data>\d+)_mp_rank_(?P<model>\d+)(?P<tail>_(?:optim|model)_states\.pt)$"
)
_OPTIMIZER = "_optim_states.pt"
_MODEL = re.compile(r"^(?:zero_pp_rank_\d+_)?mp_rank_(?P<model>\d+)_model_states\.pt$")
_EXPERT = re.compile(  # of a mixture of experts: `layer_0_expert_3_mp_rank_00_model_states.pt`
    r"^(?P<head>(?:layer_(?P<layer>\d+)_)?expert_)(?P<number>\d+)(?P<tail>_mp_rank_(?P<model>\d+)_model_states\.pt)$"
)
_DEEPSPEED_MOST = 100_000  # ranks


class DeepSpeed(Format):
    """DeepSpeed's folders `global_stepN/`."""

    name = "deepspeed"
    tracker = "latest"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"_model_states\.pt$",
        "the optimizer's state": r"_optim_states\.pt$",
    }

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(name.endswith((_OPTIMIZER, "_model_states.pt")) for name in names)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            _check_deepspeed(names, into, prefix)


def _check_deepspeed(names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Adds a problem for each missing file."""
    parts = [match for match in map(_DEEPSPEED_OF_RANK.match, names) if match]
    models = {int(match["model"]) for match in map(_MODEL.match, names) if match}
    optimizers = {int(part["model"]) for part in parts if part["tail"] == _OPTIMIZER}
    note_missing(into, prefix, _with_experts(names, models, into, prefix), set(names))
    if not optimizers and not _number(into, prefix, "ds_config.zero_optimization.stage"):
        return
    size = max([_number(into, prefix, "dp_world_size"), *(int(part["data"]) + 1 for part in parts)])
    wanted = [f"mp_rank_{model:02}_model_states.pt" for model in sorted(optimizers - models)]
    sets = {(part["head"], part["tail"]) for part in parts}  # in stage 3, each rank has a part of the model, too
    sets |= set() if optimizers else {("zero_pp_rank_", _OPTIMIZER)}
    for model in sorted(models | optimizers):
        for head, tail in sorted(sets):
            wanted += [f"{head}{data}_mp_rank_{model:02}{tail}" for data in range(min(size, _DEEPSPEED_MOST))]
    note_missing(into, prefix, wanted, set(names))


def _with_experts(names: Sequence[str], models: set[int], into: Checkpoint, prefix: str) -> list[str]:
    """The files that must be there beside files of experts: all experts of each layer, the rest of the model, and the
    optimizer of the experts."""
    experts = [match for match in map(_EXPERT.match, names) if match]
    wanted = []
    for head, layer, tail in {(one["head"], one["layer"], one["tail"]) for one in experts}:
        there = (int(one["number"]) + 1 for one in experts if (one["head"], one["tail"]) == (head, tail))
        count = max(*there, _number(into, prefix, f"num_experts.{layer}"), 0)
        wanted += [f"{head}{number}{tail}" for number in range(min(count, _DEEPSPEED_MOST))]
    for model in {int(one["model"]) for one in experts}:
        wanted += [f"expp_rank_0_mp_rank_{model:02}{_OPTIMIZER}"]
        wanted += [] if model in models else [f"mp_rank_{model:02}_model_states.pt"]
    return sorted(wanted)


def _number(into: Checkpoint, prefix: str, name: str) -> int:
    """The highest value of `name` in the folder's files. 0 if there is none."""
    found = [value for key, value in into.values.items() if key.startswith(prefix) and key.endswith(f".pt:{name}")]
    return max((int(value) for value in found if value.isdigit()), default=0)


_RANK = re.compile(r"^mp_rank_(?P<tensor>\d{2})(?:_(?P<pipeline>\d{3}))?(?:_\d{3})?$")
_MEGATRON_FOLDER = re.compile(r"(^|/)(iter_\d{7}|release)/?$")
_COMMON, _BACKEND = "common.pt", "metadata.json"
_MEGATRON_OF_RANK = ("model_optim_rng.pt", "distrib_optim.pt", "model_rng.pt", "optim.pt")  # the last two: until 2022
_SIZE = re.compile(r":args\.(?P<axis>tensor|pipeline)_model_parallel_size$")
_MEGATRON_MOST = 100  # ranks: two digits


class Megatron(Format):
    """Megatron-LM's folders `iter_N/`."""

    name = "megatron"
    asked = 10  # before DCP: a folder of torch_dist is one of DCP too
    tracker = "latest_checkpointed_iteration.txt"

    def tracked(self, text: str) -> str | None:
        return f"iter_{int(text):07}" if text.isdecimal() else "release" if text == "release" else None

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        """Whether the folder is of this format. One of the format's own files may be missing, and other formats may
        have files with these names, so the name of the folder decides too."""
        ranks = [name for name in names if _RANK.match(name)]
        if _MEGATRON_FOLDER.search(folder):
            return bool(ranks) or not {_COMMON, _BACKEND}.isdisjoint(names)
        inside = [set(files.names(path)) for name in ranks if files.is_dir(path := f"{folder}/{name}")]
        return bool(ranks) and (not any(inside) or any(not each.isdisjoint(_MEGATRON_OF_RANK) for each in inside))

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            _check_megatron(files, folder, names, into, prefix)


def _check_megatron(files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Adds a problem for each missing file."""
    ranks = [match for match in map(_RANK.match, names) if match]
    backend = into.values.get(f"{prefix}{_BACKEND}:sharded_backend", "'torch_dist'")
    if not ranks and backend != "'torch_dist'":
        text = f"{prefix}{_BACKEND}: its tensors are in the form {backend}, which is not read"
        into.problems.append(Problem(Trouble.UNKNOWN, text))
        return
    missing = [name for name in (METADATA, _COMMON, _BACKEND) if not ranks and name not in names]
    if ranks:
        inside = {match[0]: files.names(f"{folder}/{match[0]}") for match in ranks}
        every = {name for each in inside.values() for name in each if name in _MEGATRON_OF_RANK} or set(
            _MEGATRON_OF_RANK[:1]
        )
        missing = [f"{rank}/{name}" for rank, each in inside.items() for name in sorted(every - set(each))]
        every_rank = _grid(ranks, into, f"{prefix}mp_rank_")
        missing += [name for name in every_rank if not any(rank.startswith(name) for rank in inside)]
        if not any(_SIZE.search(name) for name in into.values if name.startswith(prefix)):
            into.left_open.append("whether folders mp_rank_* are missing: they don't hold the arguments of the job")
    into.problems += [Problem(Trouble.TORN, f"{prefix}{name}: missing") for name in missing]


def _grid(ranks: Sequence[re.Match[str]], into: Checkpoint, head: str) -> list[str]:
    """The names of the folders of all ranks; at least one of them is there. How many ranks there are is in the
    arguments of the job, which each rank saves."""

    def count(axis: str) -> int:
        sizes = [
            min(int(value), _MEGATRON_MOST) for name, value in into.values.items()
            if name.startswith(head) and (size := _SIZE.search(name)) and size["axis"] == axis and value.isdecimal()
        ]  # fmt: skip
        return max([*(int(match[axis] or 0) + 1 for match in ranks), *sizes])

    if not any(match["pipeline"] for match in ranks):
        return [f"mp_rank_{tensor:02}" for tensor in range(count("tensor"))]
    grid = itertools.product(range(count("tensor")), range(count("pipeline")))
    return [f"mp_rank_{tensor:02}_{pipeline:03}" for tensor, pipeline in grid]


_LAST = "checkpoint_metadata.json"
_AXIS = re.compile(r"(?<![a-z])(?P<axis>pp|tp|dp|exp)(?P<word>-rank)?-(?P<number>\d+)-of-(?P<count>\d+)")
_PARTS = frozenset({"optimizer", "random", "lr_scheduler", "model_config.json"})
_MOST = 100_000  # ranks


class Nanotron(Format):
    """nanotron's folders `N/`."""

    name = "nanotron"
    tracker = "latest.txt"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"^model/",
        "the optimizer's state": r"^optimizer/.*\.pt$",
        "the learning rate schedule": r"^lr_scheduler/",
        "the state of the random number generators": r"^random/",
    }

    def tracked(self, text: str) -> str | None:
        return text if text.isdecimal() else None

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return _LAST in names or ("model" in names and len(_PARTS.intersection(names)) > 1)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            note_missing(into, prefix, [_LAST], set(names))
        sets: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if _AXIS.search(name):
                sets[_AXIS.sub(_without_number, name)].append(name)
        for found in sets.values():
            note_missing(into, prefix, _wanted(found), set(names))


def _without_number(match: re.Match[str]) -> str:
    return f"{match['axis']}{match['word'] or ''}-#-of-{match['count']}"


def _wanted(found: Sequence[str]) -> list[str]:
    """The names of all files of a set, of which `found` are there. All parts of one weight are of the same rank of
    pipeline parallelism."""
    axes = list(_AXIS.finditer(found[0]))
    ranges = []
    for place, axis in enumerate(axes):
        is_owner = axis["axis"] == "pp" and axis["word"]
        there = (int(list(_AXIS.finditer(name))[place]["number"]) for name in found)
        ranges.append(sorted(set(there)) if is_owner else range(min(int(axis["count"]), _MOST)))
    names = []
    for numbers in itertools.islice(itertools.product(*ranges), _MOST):
        left = iter(numbers)
        names.append(_AXIS.sub(lambda match: _without_number(match).replace("#", str(next(left))), found[0]))  # noqa: B023
    return names


_VERL_FOLDER = re.compile(r"(^|/)global_step_\d+/?$")
_VERL_OF_RANK = re.compile(r"^(?P<head>\w+_world_size_(?P<count>\d+)_rank_)\d+(?P<tail>\.pt)$")
_OWN = frozenset({"actor", "critic", "data.pt"})


class Verl(Format):
    """verl's folders `global_step_N/`."""

    name = "verl"
    tracker = "latest_checkpointed_iteration.txt"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"(^|/)model_world_size_|\.distcp$|\.safetensors$",
        "the optimizer's state": r"(^|/)optim_world_size_|\.distcp$",
        "the schedule and the random number generators": r"(^|/)extra_state_world_size_|\.distcp$",
        "how far the data was read": r"^data\.pt$",
    }

    def tracked(self, text: str) -> str | None:
        return f"global_step_{text}" if text.isdecimal() else None

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        own = _VERL_FOLDER.search(folder) and not _OWN.isdisjoint(names)
        return bool(own) or any(map(_VERL_OF_RANK.match, names))

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        for head, count, tail in sorted({match.groups() for match in map(_VERL_OF_RANK.match, names) if match}):
            wanted = [f"{head}{rank}{tail}" for rank in range(min(int(count), _MOST))]
            note_missing(into, prefix, wanted, set(names))


_OF_SET = re.compile(r"\.(?:safetensors|bin)\.index\.json$|-\d{5,6}-of-\d{5,6}\.(?:safetensors|bin|pth?)$")


class Sharded(Format):
    """Sharded safetensors or torch.save files, with an index or numbered `-00001-of-00003`."""

    name = "sharded"
    asked = 90
    model_only = True

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(map(_OF_SET.search, names))

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        for name in names:
            if name.endswith(".index.json"):
                _check_index(files, folder, name, set(names), into, prefix)


def _check_index(files: Files, folder: str, name: str, have: set[str], into: Checkpoint, prefix: str) -> None:
    """Checks that every tensor of an index is in the file that the index names for it."""
    try:
        weights = read_json(files, f"{folder}/{name}").get("weight_map")
    except (Unreadable, OSError):
        return  # the reader of the file itself has reported it
    if weights is None and not Sharded().is_folder(files, folder, [name]):
        return  # an index of something else
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        into.problems.append(Problem(Trouble.UNREADABLE, f"{prefix}{name}: it has no weight_map", f"{folder}/{name}"))
        return
    note_missing(into, prefix, sorted(set(weights.values())), have)
    entries = {name[: end.start()] for name in into.tensors for end in re.finditer(r"\.|$", name)}  # and all above
    for tensor, file in weights.items():
        if file in have and f"{prefix}{file}:{tensor}" not in entries:
            text = f"{prefix}{file}: it lacks {tensor}, which {name} says is in it"
            into.problems.append(Problem(Trouble.TORN, text, f"{folder}/{file}", tensor))
            return


class Numbered(Format):
    """A folder with a step in its name that belongs to no other format."""

    name = "dir"
    asked = 100

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return bool(NUMBERED.search(posixpath.basename(folder))) and not _only_holds_checkpoints(files, folder, names)


def _only_holds_checkpoints(files: Files, path: str, names: Sequence[str]) -> bool:
    """Whether a folder with a number in its name contains only other checkpoints, like `run-step-1/checkpoint-10/`."""
    inner = [name for name in names if files.is_dir(f"{path}/{name}")]
    return bool(inner) and len(inner) == len(names) and any(NUMBERED.search(name) for name in inner)
