"""What a resume needs, by format, and which of it a checkpoint lacks.

The formats' own writers: transformers.Trainer._save_checkpoint, lightning's dump_checkpoint, accelerate's
save_accelerator_state, deepspeed's engine.save_checkpoint. Of formats without rules of their own the names of the
entries tell: that is a guess, and so what is missing is told and is no damage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..layout import Checkpoint

_GUESSED = {
    "the optimizer's state": re.compile(r"optim|exp_avg|momentum|(^|[.:])opt\b", re.I),
    "the learning rate schedule": re.compile(r"sched|last_epoch|(^|[.:_])lr", re.I),
    "the state of the random number generators": re.compile(r"rng|random|seed|mt19937", re.I),
    "how far training was": re.compile(r"step|iter|epoch|consumed", re.I),
}
_FILES = {
    "huggingface": {
        "the model": r"^(model|pytorch_model|adapter_model).*\.(safetensors|bin)$|^(global_step|pytorch_model_fsdp)",
        "the optimizer's state": r"^optimizer.*\.(pt|bin)$|^optimizer_\d+/|global_step",
        "the learning rate schedule": r"^scheduler\.pt$",
        "the state of the random number generators": r"^rng_state(_\d+)?\.pth$",
        "how far training was": r"^trainer_state\.json$",
    },
    "accelerate": {
        "the model": r"^(model|pytorch_model).*\.(safetensors|bin)$|^pytorch_model_\w+/",
        "the optimizer's state": r"^optimizer(_\d+)?\.bin$|^optimizer_\d+/",
        "the state of the random number generators": r"^random_states_\d+\.pkl$",
    },
    "deepspeed": {
        "the model": r"_model_states\.pt$",
        "the optimizer's state": r"_optim_states\.pt$",
    },
}
_KEYS = {
    "lightning": {
        "the model": r"^state_dict\.",
        "the optimizer's state": r"^optimizer_states\.",
        "how far training was": r"^global_step$",
        "the state of the loops": r"^loops\.",
    }
}


def missing(found: Checkpoint) -> list[str]:
    """In words; empty where all is there."""
    if found.format in ("safetensors", "sharded", "dcp_safetensors"):
        return [f"{what}: this format holds tensors of a model only" for what in list(_GUESSED)[:1]]
    if found.format in _FILES:
        names = [file.path[len(found.path) + 1 :] for file in found.files]
        return _lacking(_FILES[found.format], names)
    names = [*found.tensors, *found.values]
    if found.format in _KEYS:
        return _lacking(_KEYS[found.format], names)
    return [what for what, pattern in _GUESSED.items() if not any(map(pattern.search, names))]


def _lacking(wanted: dict[str, str], names: Iterable[str]) -> list[str]:
    listed = list(names)
    return [what for what, pattern in wanted.items() if not any(re.search(pattern, name) for name in listed)]
