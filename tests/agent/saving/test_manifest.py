"""The manifests of saves: their contents for each way of saving, and that the job's own files do not change."""

from __future__ import annotations

import json
import os
import threading
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


def digests(saved: dict[str, Any], data: bytes, hashing: Any) -> tuple[str, str]:
    """Of each chunk of each span: as the manifest has it, and as the file is."""
    told, found = "", ""
    for offset, length, text in saved["spans"]:
        told += text
        for at in range(offset, offset + length, hashing.CHUNK):
            chunk = data[at : min(at + hashing.CHUNK, offset + length)]
            found += hashing.xxh3_64(chunk).hexdigest() if "xxh3" in saved["algorithm"] else ""
            found += f"{zlib.crc32(chunk):08x}" if "crc32" in saved["algorithm"] else ""
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
        told, seen = digests(saved, path.read_bytes(), agent_module("agent.saving.digesting_writers"))
        assert told == seen, name
        assert sum(length for _, length, _ in saved["spans"]) > 0.9 * about.st_size
    assert len(found["path.pt"]["spans"]) > 2  # record by record: torch writes the file by itself


def test_crcs_where_the_format_has_none(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """Safetensors keep no checksum: a CRC of each chunk is added in the background, from which one bit is found."""
    pytest.importorskip("safetensors")
    hashing = agent_module("agent.saving.digesting_writers")
    ran = rank.run(
        """
import os, torch
from safetensors.torch import save_file
save_file({"a": torch.arange(400_000.0), "b": torch.ones(3)}, os.environ["FOLDER"] + "/m.safetensors")
"""
    )
    assert ran.code == 0, ran.output
    saved = manifests(rank.folder)["m.safetensors"]
    assert saved["algorithm"] == ("crc32" if hashing.xxh3_64 is None else "xxh3+crc32")
    told, seen = digests(saved, (rank.folder / "m.safetensors").read_bytes(), hashing)
    assert told == seen


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
    hashing, data = agent_module("agent.saving.digesting_writers"), (rank.folder / "a.pt").read_bytes()
    told = saved["spans"][0][2]
    digester = hashing.Digester()
    digester.update(memoryview(data))
    assert told[: len(digester.digests())] != digester.digests()
    assert saved["algorithm"] == hashing.ALGORITHM  # no CRC is taken of a file that is not what was in memory


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


def test_the_old_form(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """torch.save's form from before 1.6, to a path or an open file, is digested whole, and is as without the agent."""
    ran = rank.run(
        """
import os, pickle, torch
folder, state = os.environ["FOLDER"], {"a": torch.arange(400_000.0), "b": torch.ones(3)}
torch.save(state, folder + "/path.pt", _use_new_zipfile_serialization=False)
with open(folder + "/open.pt", "wb") as file: torch.save(state, file, pickle, 2, False)
with open(folder + "/plain.pt", "wb") as file:
    file.write(b"x")
    torch.save(state, file, _use_new_zipfile_serialization=False)
"""
    )
    assert ran.code == 0, ran.output
    assert ran.failures == []
    found = manifests(rank.folder)
    assert set(found) == {"path.pt", "open.pt"}  # what is not written from the start of a file is in no manifest
    plain = (rank.folder / "plain.pt").read_bytes()[1:]
    for name, saved in found.items():
        data, hashing = (rank.folder / name).read_bytes(), agent_module("agent.saving.digesting_writers")
        assert len(data) == len(plain) == saved["size"]
        assert saved["spans"][0][:2] == [0, len(data)]
        told, seen = digests(saved, data, hashing)
        assert told == seen


def test_a_save_lends_a_hand(agent_module: Callable[[str], Any]) -> None:
    """What the helper has not begun when a save is over is done by the thread that saves, and nothing twice."""
    helper, begun, go = agent_module("agent.saving.digesting_writers").Helper(), threading.Event(), threading.Event()
    done: list[tuple[int, int]] = []

    def hold() -> None:
        begun.set()
        go.wait(300)

    helper.do(hold)
    assert begun.wait(300)
    for number in range(3):
        helper.do(lambda number=number: done.append((number, threading.get_ident())))
    helper.help_out(lambda: len(done) == 2)
    assert done == [(0, threading.get_ident()), (1, threading.get_ident())]
    go.set()
    helper.finish()
    assert [number for number, _thread in done] == [0, 1, 2]


@pytest.mark.parametrize("sizes", [[5], [1 << 20], [1000, (1 << 20) - 1000, 7], [(3 << 20) + 1]])
def test_chunks(sizes: list[int], agent_module: Callable[[str], Any]) -> None:
    """Digests are of whole chunks, however the bytes come."""
    hashing = agent_module("agent.saving.digesting_writers")
    data = bytes(range(256)) * (sum(sizes) // 256 + 1)
    digester, at = hashing.Digester(), 0
    for size in sizes:
        digester.update(memoryview(data)[at : at + size])
        at += size
    text = digester.digests()
    parts = [data[place : min(place + hashing.CHUNK, at)] for place in range(0, at, hashing.CHUNK)]
    if hashing.ALGORITHM == "crc32":
        assert text == "".join(f"{zlib.crc32(part):08x}" for part in parts)
    else:
        assert text == "".join(hashing.xxh3_64(part).hexdigest() for part in parts)


def test_a_save_is_announced_before_its_digests_are_known(rank: Any) -> None:
    """A process that is killed just after a save leaves a manifest without digests: the file is known to be another
    one than that of the save before."""
    ran = rank.run(
        """
import os, time, torch, _torchaos.agent.saving.manifest_writer as ledger
ledger.rest_of = lambda *_: time.sleep(60)
torch.save({"a": torch.ones(3)}, os.environ["FOLDER"] + "/path.pt")
with open(os.environ["FOLDER"] + "/open.pt", "wb") as file: torch.save({"a": torch.ones(3)}, file)
os.kill(os.getpid(), 9)
"""
    )
    assert ran.code == -9, ran.output
    found = manifests(rank.folder)
    assert set(found) == {"path.pt", "open.pt"}
    for saved in found.values():
        about = Path(saved["path"]).stat()
        assert (saved["size"], saved["ino"], saved["spans"]) == (about.st_size, about.st_ino, [])


def test_the_helper_has_the_priority_of_the_job(agent_module: Any) -> None:
    """A thread of a lower priority that is put off while it holds the interpreter's lock stops the job with it."""
    seen: list[int] = []
    helper = agent_module("agent.saving.digesting_writers").Helper()
    helper.do(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    helper.finish()
    assert seen == [os.getpriority(os.PRIO_PROCESS, threading.main_thread().native_id or 0)]
