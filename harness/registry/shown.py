"""How the effect of a fault was shown: *real* (the hardware, the kernel or a library did it) or *synthetic* (an
imitation of a report), and for faults of GPUs and NCCL on which card. The records are in injectors/shown.yaml, written
by lab/gpu-check; nothing else claims a GPU."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

_OF_GPUS = frozenset({"gpu", "cuda", "nccl"})


@cache
def records() -> tuple[dict[str, str], ...]:
    """The records, oldest first. Keys: injector, row, card, driver, nccl, torch, date, commit."""
    return tuple(yaml.safe_load((files("torchaos.injectors") / "shown.yaml").read_text()))


def on_a_gpu(injector: str) -> dict[str, str] | None:
    """The newest record of an injector, None without a record."""
    return next((one for one in reversed(records()) if one["injector"] == injector), None)


def needs_a_gpu(injector: Any) -> bool:
    """Whether only a GPU can show the whole effect: faults of GPUs, CUDA and NCCL."""
    return injector.name.partition(".")[0] in _OF_GPUS or "nvtx" in injector.needs


def shown_in_words(injector: Any) -> str:
    """A line for `torchaos list`."""
    effect = f"synthetic: it imitates {injector.imitates}" if injector.imitates else "real"
    if not needs_a_gpu(injector):
        return f"effect: {effect}"
    record = on_a_gpu(injector.name)
    if record is None:  # only a record may call it real
        return f"effect: {effect}; not shown on a GPU yet" if injector.imitates else "effect: not shown on a GPU yet"
    versions = f"driver {record['driver']}, NCCL {record['nccl']}, torch {record['torch']}"
    return f"effect: {effect}; shown on {record['card']} ({versions}; {record['date']}, commit {record['commit']})"
