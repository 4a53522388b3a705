"""How the effect of a fault was shown: *real* (the hardware, the kernel or a library did it), *replayed* (what a real
one said was recorded, and is said again) or *synthetic* (an imitation of a report), and for faults of GPUs and NCCL on
which card. The records are in injectors/shown.yaml, written by lab/gpu-check; nothing else claims a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from torchaos.harness import registry
from torchaos.harness.registry import ready

Record = Mapping[str, str]
_OF_GPUS = frozenset({"gpu", "cuda", "nccl"})
TIERS = ("synthetic", "replayed", "real")  # the weakest first


@cache
def records() -> tuple[Record, ...]:
    """The records, oldest first. Keys: injector, row, tier, card, driver, nccl, torch, date, commit. `row`: of
    lab/gpu-check, such as the name of a ready scenario."""
    return tuple(yaml.safe_load((files("torchaos.injectors") / "shown.yaml").read_text()))


def tier_of(injector: Any) -> str:
    return "replayed" if injector.replays else "synthetic" if injector.imitates else "real"


def needs_a_gpu(injector: Any) -> bool:
    """Whether only a GPU can show the whole effect: faults of GPUs, CUDA and NCCL."""
    return injector.name.partition(".")[0] in _OF_GPUS or "nvtx" in injector.needs


def shown_in_words(injector: Any, known: Sequence[Record] | None = None) -> str:
    """A line for `torchaos list`. `known`: the records, if not those of this installation."""
    told = {"real": "real", "replayed": f"replayed: it says again what {injector.replays} said"}
    effect = told.get(tier_of(injector), f"synthetic: it imitates {injector.imitates}")
    if not needs_a_gpu(injector):
        return f"effect: {effect}"
    record = _newest("injector", injector.name, known)
    if record is None:  # only a record may call it real, or a replay
        synthetic = tier_of(injector) == "synthetic"
        return f"effect: {effect}; not shown on a GPU yet" if synthetic else "effect: not shown on a GPU yet"
    return f"effect: {effect}; shown on {_machine(record)}"


def scenario_in_words(name: str, injectors: Sequence[Any], known: Sequence[Record] | None = None) -> str:
    """The same line for a ready scenario with faults of these injectors: it is as real as the least real of them."""
    tier = min(map(tier_of, injectors), key=TIERS.index, default="real")
    if not any(map(needs_a_gpu, injectors)):
        return f"effect: {tier}"
    record = _newest("row", name, known)
    if record is None:
        return f"effect: {tier}; not shown on a GPU yet" if tier == "synthetic" else "effect: not shown on a GPU yet"
    return f"effect: {tier}; shown on {_machine(record)}"


def injectors_in(scenario: str) -> list[Any]:
    """The injectors of a ready scenario."""
    faults = yaml.safe_load((ready.folder() / f"{scenario}.yaml").read_text()).get("faults") or ()
    return [registry.find("injectors", name) for name in dict.fromkeys(fault["inject"] for fault in faults)]


def table(known: Sequence[Record] | None = None) -> str:
    """Injectors and ready scenarios, each with its line, as Markdown, without those that are real and need no GPU."""
    told = {name: shown_in_words(found, known) for name, found in registry.injectors().items()}
    told |= {name: scenario_in_words(name, injectors_in(name), known) for name in ready.names()}
    lines = [
        f"| `{name}` | {words.removeprefix('effect: ')} |" for name, words in told.items() if words != "effect: real"
    ]
    return "\n".join(["| injector or scenario | effect |", "|---|---|", *lines, ""])


def _newest(key: str, value: str, known: Sequence[Record] | None) -> Record | None:
    return next((one for one in reversed(records() if known is None else known) if one[key] == value), None)


def _machine(record: Record) -> str:
    versions = f"driver {record['driver']}, NCCL {record['nccl']}, torch {record['torch']}"
    return f"{record['card']} ({versions}; {record['date']}, commit {record['commit']})"
