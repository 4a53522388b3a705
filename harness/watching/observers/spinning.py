"""Finds GPUs that only wait while the job hangs: a kernel that waits for another GPU, as NCCL's kernels do, keeps its
own GPU busy all the time, and no bytes go over the links. This is a fact for the report. It is no reason to declare a
hang, because a kernel that only computes looks the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchaos.harness.watching.probes.gpus import Sample

_BUSY, _LINKS = 99.0, {"nvlink_bytes": "NVLink", "pcie_bytes": "PCIe"}
_MOST = 1 << 20  # bytes a second over each link: the questions to the driver go over PCIe, too


def spinning(seen: Mapping[int, Sequence[Sample]], since_s: float) -> Iterator[tuple[int, str]]:
    """Yields (rank, clause) for each rank whose GPU was busy all the time since `since_s` (CLOCK_MONOTONIC) and moved
    hardly any bytes. A GPU with fewer than two samples, or without a counter of bytes, is left out."""
    for gpu, samples in seen.items():
        during = [sample for sample in samples if sample.at_s >= since_s]
        if len(during) < 2 or any(sample.values.get("busy_percent", 0.0) < _BUSY for sample in during):
            continue
        first, last = during[0], during[-1]
        both = first.values.keys() & last.values.keys()
        moved = {words: last.values[name] - first.values[name] for name, words in _LINKS.items() if name in both}
        took_s = last.at_s - first.at_s
        if moved and all(0 <= many <= _MOST * took_s for many in moved.values()):
            over = " and ".join(f"{many:.0f} bytes over {words}" for words, many in moved.items())
            for rank in last.ranks:
                yield rank, f"its GPU {gpu} was busy all the time for {took_s:.1f} s, and moved {over}"
