"""The GPU that a rank uses, from its environment, read as CUDA reads it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from torchaos.harness.host import gpu_devices
from torchaos.harness.host.gpu_devices import Gpu, gpu_of, gpus_here

H100 = "NVIDIA H100 80GB HBM3"
HERE = [
    Gpu("GPU-5f3c0a11-0000-4000-8000-000000000000", H100),
    Gpu("GPU-5f3c9b22-0000-4000-8000-000000000001", H100),
    Gpu("GPU-81d4c733-0000-4000-8000-000000000002", H100),
    Gpu("GPU-c0ffee44-0000-4000-8000-000000000003", H100),
]


@pytest.mark.parametrize(
    ("listed", "local_rank", "gpu"),
    [
        (None, 2, 2),
        (None, 4, None),
        ("", 0, None),
        ("-1", 0, None),
        ("2,3", 0, 2),
        ("2,3", 1, 3),
        ("2,3", 2, None),
        (" 2 , 3 ", 1, 3),
        ("3", 1, 3),
        ("0,0", 0, None),
        ("1,-1,2", 0, 1),
        ("1,-1,2", 1, 1),
        ("0,9,1", 1, 0),
        ("0,9,1", 2, 0),
        ("1gpu2,2ampere", 1, 2),
        ("x", 0, None),
        (HERE[3].uuid, 0, 3),
        (f"{HERE[3].uuid},{HERE[0].uuid}", 1, 0),
        ("GPU-c0f,GPU-81", 1, 2),
        ("GPU-5f3c", 0, None),
        ("GPU-5f3c9", 0, 1),
        ("GPU-81,GPU-81d4", 0, None),
        ("GPU-81,GPU-none,GPU-c0", 1, 2),
        ("GPU-81,GPU-none,GPU-c0,GPU-c0", 0, None),
        ("GPU-", 0, None),
        ("c0ffee44", 0, None),
        (f"MIG-{HERE[1].uuid}/3/0", 0, 1),
        ("MIG-0e35f1cb-0000-5000-8000-000000000000", 0, None),
    ],
)
def test_the_gpu_of_a_rank(listed: str | None, local_rank: int, gpu: int | None) -> None:
    """Numbers, UUIDs, their beginnings, names of MIG, and lists that hide some or all GPUs. A rank that sees one GPU
    alone uses that one. A GPU that is not known is never guessed."""
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert gpu_of(env, local_rank, HERE) == gpu


def test_it_is_read_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 lists of right and wrong entries, seed 0: each local rank that torch gives a device has that GPU."""
    cuda = pytest.importorskip("torch.cuda", reason="torch is not installed")
    uuids, chance = [one.uuid for one in HERE], random.Random(0)
    numbers = ["0", "1", "2", "3", "03", "+1", " 2", "7", "-1", "1x", "x1", ""]
    names = [*uuids, *(uuid[:9] for uuid in uuids), "GPU-", "GPU-no", "0", ""]
    for _ in range(4000):
        listed = ",".join(chance.choices(chance.choice([numbers, names]), k=chance.randint(1, 5)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        parsed = cuda._parse_visible_devices()
        torch = cuda._transform_uuid_to_ordinals(parsed, uuids) if listed.startswith("GPU-") else parsed
        beyond = [place for place, number in enumerate(torch) if number >= len(HERE)]
        torch = torch[: beyond[0]] if beyond else torch  # NVML has no such GPU, so CUDA stops there
        for local_rank in range(5):
            ours = gpu_of(dict(os.environ), local_rank, HERE)
            alone = torch[0] if len(torch) == 1 else None
            assert ours == (torch[local_rank] if local_rank < len(torch) else alone), (listed, local_rank)


def test_the_fastest_gpu_may_come_first() -> None:
    """With GPUs of two models CUDA's numbers are not NVML's, unless CUDA_DEVICE_ORDER says so; UUIDs are the same."""
    mixed = [Gpu("GPU-aaaa", "NVIDIA T400"), Gpu("GPU-bbbb", H100)]
    assert gpu_of({}, 0, mixed) is None
    assert gpu_of({"CUDA_VISIBLE_DEVICES": "1"}, 0, mixed) is None
    assert gpu_of({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, mixed) == 1
    assert gpu_of({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, 0, mixed) == 1


@pytest.mark.parametrize(
    ("listed", "gpu"),
    [(None, 1), ("", 1), ("-1", 1), ("4,6", 6), ("GPU-746f7263-6861-6f73-0000-00000000000b", 11), ("GPU-81", None)],
)
def test_without_a_driver_gpus_are_simulated(listed: str | None, gpu: int | None) -> None:
    """Then each rank has the overlay's GPU of its number, also where GPUs are hidden, and the overlay's UUIDs count."""
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert gpu_of(env, 1, []) == gpu


def test_the_gpus_of_the_driver(tmp_path: Path) -> None:
    """As /proc/driver/nvidia/gpus shows them; the order is that of the PCI addresses."""
    for pci, uuid in (("0000:9a:00.0", "GPU-b"), ("0000:1b:00.0", "GPU-a")):
        (tmp_path / pci).mkdir()
        text = f"Model: \t\t {H100}\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nBus Location: \t {pci}\nDevice Minor: \t 0\n"
        (tmp_path / pci / "information").write_text(text)
    assert gpus_here(tmp_path) == (Gpu("GPU-a", H100), Gpu("GPU-b", H100))
    assert gpus_here(tmp_path / "none") == ()
    assert gpu_devices.DRIVER.parts[-2:] == ("nvidia", "gpus")
