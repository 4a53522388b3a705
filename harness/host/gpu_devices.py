"""The GPUs of this machine, as NVIDIA's driver lists them in /proc, and the GPU that a rank uses.

CUDA and NVML number GPUs differently: `CUDA_VISIBLE_DEVICES` hides and reorders them for CUDA only. The variable is
read here as CUDA reads it (its programming guide, "CUDA Environment Variables"; torch/cuda/__init__.py,
`_parse_visible_devices`)."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

READER = (sys.executable, "-m", "torchaos.harness.host.nvml_reader")  # a process that asks the driver
_PATIENCE_S = 20.0
DRIVER = Path("/proc/driver/nvidia/gpus")
_SIMULATED = re.compile(r"GPU-746f7263-6861-6f73-0000-([0-9a-f]{12})")  # simulate.c of the NVML overlay


@dataclass(frozen=True)
class Gpu:
    uuid: str  # such as GPU-5f3c...; with question marks if the driver has not started the GPU yet
    model: str


@lru_cache
def gpus_here(folder: Path = DRIVER) -> tuple[Gpu, ...]:
    """The GPUs in the order of their PCI addresses, which is also NVML's order. Empty if there is no driver."""
    found = []
    for path in sorted(folder.glob("*/information")):
        with suppress(OSError):
            rows = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
            told = {name.strip(): value.strip() for name, _, value in rows}
            found.append(Gpu(told.get("GPU UUID", ""), told.get("Model", "")))
    return tuple(found)


def gpu_of(environ: Mapping[str, str], local_rank: int, here: Sequence[Gpu] | None = None) -> int | None:
    """NVML's index of the GPU that a rank uses, as far as its environment shows it: CUDA's device number `local_rank`,
    or the only device that the rank sees. None if the rank sees no GPU, or if this is not known. `here`: the GPUs of
    the machine."""
    here = gpus_here() if here is None else here
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if not here and listed in ("", "-1"):
        listed = None  # there is no GPU to hide; the overlay simulates a GPU for each rank
    prefix = next((start for start in ("GPU-", "MIG-") if (listed or "").startswith(start)), "")
    if not prefix and len({gpu.model for gpu in here}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None  # CUDA numbers the fastest GPU 0, whatever its PCI address is
    visible = range(len(here) or local_rank + 1) if listed is None else _visible(listed.split(","), prefix, here)
    return visible[local_rank] if local_rank < len(visible) else visible[0] if len(visible) == 1 else None


def driver_is_here() -> bool:
    """Whether nvidia-ml-py would find the driver's library."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@lru_cache
def parent_of(mig: str) -> int | None:
    """NVML's index of the GPU that contains this MIG device. None if the driver does not know the device, or can't be
    asked. This may take 20 s."""
    found: int | None = _ask("--parent", mig)
    return found


def held_by(pids: Iterable[int]) -> list[dict[str, int]] | None:
    """The GPU memory that these processes hold: `gpu` (NVML's index), `pid` and `bytes` of each. None if the driver
    can't be asked. This may take 20 s."""
    found: list[dict[str, int]] | None = _ask("--held", *map(str, pids)) if driver_is_here() else None
    return found


def _ask(*words: str) -> Any:
    asker = subprocess.Popen([*READER, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        answer, _ = asker.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        asker.kill()  # not waited for, because it does not end while the driver is busy with a broken GPU
        return None
    return json.loads(answer) if asker.returncode == 0 else None


def _visible(words: Sequence[str], prefix: str, here: Sequence[Gpu]) -> Sequence[int]:
    """The indices of the GPUs that CUDA sees, in CUDA's order. A word that names no GPU hides all GPUs after it. If a
    word or a GPU occurs twice, all GPUs are hidden."""
    if prefix:
        read: list[str | int] = [*takewhile(lambda word: word.startswith(prefix), words)]
    else:  # as strtol(3) reads it: "1gpu" is 1
        numbers = takewhile(bool, (re.match(r"\+?(\d+)", word.strip(), re.ASCII) for word in words))
        read = [int(number[1]) for number in numbers if number]
    found = [*takewhile(lambda index: index is not None, (_index(entry, here) for entry in read))]
    twice = len({*read}) < len(read) or len({*found}) < len(found)
    return [] if twice else [index for index in found if index is not None]


def _index(name: str | int, here: Sequence[Gpu]) -> int | None:
    """The index of the GPU with this number, this UUID, or a UUID that begins like this. None if there is no such GPU
    or more than one. MIG-GPU-UUID/3/0 names a part of a GPU. Names like MIG-UUID are known only to the driver, so they
    give None."""
    if isinstance(name, int):
        return name if not here or name < len(here) else None
    uuid = name.removeprefix("MIG-").partition("/")[0]
    if not here and (simulated := _SIMULATED.fullmatch(uuid)):
        return int(simulated[1], 16)
    fits = [index for index, gpu in enumerate(here) if uuid.startswith("GPU-") and gpu.uuid.startswith(uuid)]
    return fits[0] if len(fits) == 1 else None
