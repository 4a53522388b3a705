"""The manifests that saves leave: what is in them, for each way of saving, and that nothing of the job changes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Callable

import pytest

SAVES = """
import os, torch, warnings
warnings.simplefilter("ignore")
folder = os.environ["FOLDER"]
state = {"a": torch.arange(400_000.0), "b": torch.ones(3), "step": 3}
torch.save(state, folder + "/path.pt")
with open(folder + "/open.pt", "wb") as file: torch.save(state, file)
from torch.distributed.checkpoint.state_dict_saver import save
save(state, checkpoint_id=folder + "/step-3")
torch.save(state, folder + "/new.tmp"); os.rename(folder + "/new.tmp", folder + "/new.pt")
"""


def manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """By the name of the file that was saved."""
    read = [json.loads(path.read_text()) for path in (folder / "agent" / "manifests").glob("*.json")]
    assert all(one["lost"] == [] for one in read), read
    return {
        file["path"].rpartition("/")[2]: {"algorithm": one["algorithm"], **file}
        for one in read
        for file in one["files"]
    }


def crcs(saved: dict[str, Any], data: bytes, chunk: int) -> tuple[list[str], list[str]]:
    """Of each chunk of each span: as the manifest has it, and as the file is."""
    width = 24 if saved["algorithm"] == "xxh3+crc32" else 8
    told, found = [], []
    for offset, length, text in saved["spans"]:
        told += [text[at + width - 8 : at + width] for at in range(0, len(text), width)]
        found += [
            f"{zlib.crc32(data[at : min(at + chunk, offset + length)]):08x}"
            for at in range(offset, offset + length, chunk)
        ]
    return told, found


def test_every_way_of_saving(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """Each file has a manifest that is right about its size, its inode and every chunk of it, and nothing failed."""
    ran = rank.run(SAVES)
    assert ran.code == 0, ran.output
    assert ran.failures == []
    found = manifests(rank.folder)
    assert set(found) == {"path.pt", "open.pt", "__0_0.distcp", ".metadata.tmp", "new.tmp"}
    for name, saved in found.items():
        path = Path(saved["path"])
        path = {"new.tmp": path.with_name("new.pt"), ".metadata.tmp": path.with_name(".metadata")}.get(name, path)
        about = path.stat()
        assert (saved["size"], saved["dev"], saved["ino"]) == (about.st_size, about.st_dev, about.st_ino), name
        told, seen = crcs(saved, path.read_bytes(), agent_module("manifest").CHUNK)
        assert told == seen, name
        assert sum(length for _, length, _ in saved["spans"]) > 0.9 * about.st_size
    assert len(found["path.pt"]["spans"]) > 2  # record by record: torch writes the file by itself


def test_files_are_as_without_the_agent(rank: Any, tmp_path: Path) -> None:
    """The agent changes no byte of what is saved."""
    with_agent, without = rank.folder / "with", rank.folder / "without"
    script = SAVES.replace('os.environ["FOLDER"]', 'os.environ["FOLDER"] + "/" + os.environ["WHICH"]')
    script = script.replace(
        "torch.save(state, folder", "os.makedirs(folder, exist_ok=True); torch.save(state, folder", 1
    )
    assert rank.run(script, env={"WHICH": "with"}).code == 0
    assert rank.run(script, hooks=("steps",), env={"WHICH": "without"}).code == 0
    for name in ("path.pt", "open.pt", "new.pt", "step-3/__0_0.distcp"):
        assert (with_agent / name).read_bytes() == (without / name).read_bytes(), name


def test_memory_and_not_the_file(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """What was damaged on its way to the disk differs from the manifest, which is of the bytes in memory."""
    ran = rank.run(
        """
import os, torch
class Faulty:
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        data = bytearray(data)
        if len(data) > 100_000: data[50_000] ^= 1
        return self.file.write(data)
with open(os.environ["FOLDER"] + "/a.pt", "wb") as file: torch.save({"a": torch.zeros(100_000)}, Faulty(file))
"""
    )
    assert ran.code == 0, ran.output
    saved = manifests(rank.folder)["a.pt"]
    manifest, data = agent_module("manifest"), (rank.folder / "a.pt").read_bytes()
    told = saved["spans"][0][2]
    digester = manifest.Digester()
    digester.update(memoryview(data))
    assert told[: len(digester.digests())] != digester.digests()
    assert saved["algorithm"] == manifest.ALGORITHM  # no CRC is taken of a file that is not what was in memory


def test_failed_saves(rank: Any) -> None:
    """A save that raises does so as ever, and later saves still have manifests."""
    ran = rank.run(
        """
import os, torch
folder = os.environ["FOLDER"]
try: torch.save({"a": torch.zeros(100_000), "b": lambda: 0}, folder + "/bad.pt")
except Exception as error: print(type(error).__name__)
torch.save({"a": torch.zeros(100_000)}, folder + "/good.pt")
"""
    )
    assert ran.code == 0, ran.output
    assert "Error" in ran.output
    assert ran.failures == []
    assert set(manifests(rank.folder)) == {"good.pt"}


def test_written_past_the_agent(rank: Any) -> None:
    """torch.save's old form writes tensors past Python's file object: no manifest says that they are missing."""
    ran = rank.run(
        """
import os, pickle, torch
folder = os.environ["FOLDER"]
with open(folder + "/old.pt", "wb") as file: torch.save({"a": torch.zeros(100_000)}, file, pickle, 2, False)
torch.save({"a": torch.zeros(100_000)}, folder + "/new.pt")
"""
    )
    assert ran.code == 0, ran.output
    assert ran.failures == []
    found = manifests(rank.folder)
    assert {name: one["size"] for name, one in found.items()} == {"new.pt": (rank.folder / "new.pt").stat().st_size}


@pytest.mark.parametrize("sizes", [[5], [1 << 20], [1000, (1 << 20) - 1000, 7], [(3 << 20) + 1]])
def test_chunks(sizes: list[int], agent_module: Callable[[str], Any]) -> None:
    """Digests are of whole chunks, however the bytes come."""
    manifest = agent_module("manifest")
    data = bytes(range(256)) * (sum(sizes) // 256 + 1)
    digester, at = manifest.Digester(), 0
    for size in sizes:
        digester.update(memoryview(data)[at : at + size])
        at += size
    text = digester.digests()
    parts = [data[place : min(place + manifest.CHUNK, at)] for place in range(0, at, manifest.CHUNK)]
    if manifest.ALGORITHM == "crc32":
        assert text == "".join(f"{zlib.crc32(part):08x}" for part in parts)
    else:
        assert text == "".join(manifest.xxh3_64(part).hexdigest() for part in parts)
