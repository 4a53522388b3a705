"""Numbers in a loaded checkpoint that show how far training was. They are witnesses of the step at which a resumed job
starts."""

from __future__ import annotations

import time
from typing import Any, Iterator, Mapping

_NAMES = frozenset(
    {
        *("step", "steps", "global_step", "global_steps", "current_step", "train_step", "num_steps", "n_steps"),
        *("step_count", "_step_count", "iteration", "iterations", "iter", "iters", "iter_num", "num_iterations"),
        *("epoch", "epochs", "current_epoch", "last_epoch", "batch_idx", "num_updates"),
        *("samples_seen", "consumed_samples", "consumed_train_samples"),
    }
)
_DEPTH, _ENTRIES, _LIMIT_S, _FOUND = 5, 4000, 0.005, 64


def step_numbers(contents: Any) -> dict[str, int]:
    """Integers whose names look like step counts, by their path in nested mappings and lists, such as
    `optimizer.state.0.step`. In a mapping with integer keys (an optimizer's state), only the first entry is searched.
    The search ends after _DEPTH levels or 5 ms of processor time."""
    found: dict[str, int] = {}
    end_s = time.thread_time() + _LIMIT_S  # on a busy machine the thread may wait for a processor meanwhile
    level = [("", contents)]
    looked = 0
    for _ in range(_DEPTH):
        deeper = []
        for path, value in level:
            for name, entry in _entries(value):
                looked += 1
                if looked > _ENTRIES or len(found) >= _FOUND or time.thread_time() > end_s:
                    return found
                number = _number(entry) if name in _NAMES else None
                if number is not None:
                    found[path + name] = number
                elif isinstance(entry, (dict, list, tuple, Mapping)):
                    deeper.append((f"{path}{name}.", entry))
        level = deeper
    return found


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        all_alike = len(value) > 1 and all(isinstance(name, int) for name in list(value)[:8])
        entries = list(value.items())[: 1 if all_alike else _ENTRIES]  # an optimizer's state
        return ((str(name), entry) for name, entry in entries)
    if isinstance(value, (list, tuple)):
        return ((str(place), entry) for place, entry in enumerate(value[:8]))
    return iter(())


def _number(entry: Any) -> int | None:
    if isinstance(entry, bool) or (hasattr(entry, "numel") and (entry.device.type != "cpu" or entry.numel() != 1)):
        return None
    if isinstance(entry, (int, float)) or hasattr(entry, "numel"):
        value = float(entry)
        return int(value) if value == int(value) else None
    return None
