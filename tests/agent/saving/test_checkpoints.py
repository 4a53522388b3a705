"""Events about saves and loads, for every way in which a job saves and loads."""

from __future__ import annotations

import re
from typing import Any, Callable

PREPARE = """
import io, os, torch
folder = os.environ["FOLDER"]
model = torch.nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
model(torch.ones(1, 4)).sum().backward(); opt.step()
"""

DCP = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=0, world_size=1)
"""

TRANSFERS = ("checkpoint.save_begin", "checkpoint.save_end", "checkpoint.load_begin", "checkpoint.load_end")


def told(ran: Any) -> list[tuple[str, str, str]]:
    return [
        (event.kind.value.split(".")[1], event.data["path"].rpartition("/")[2], event.data["format"])
        for event in ran.of(*TRANSFERS)
    ]


def test_torch_save_and_load(rank: Any) -> None:
    """Paths and open files are told, buffers in memory are not; a load tells the step-like numbers in it."""
    ran = rank.run(
        PREPARE
        + """
torch.save({"step": 7, "opt": opt.state_dict()}, folder + "/a.pt")
with open(folder + "/b.pt", "wb") as file: torch.save({"epoch": 2}, file)
torch.save({}, io.BytesIO())
torch.load(folder + "/a.pt")
from torch import load
with open(folder + "/b.pt", "rb") as file: load(file)
"""
    )
    assert ran.code == 0, ran.output
    a, b = ("a.pt", "torch"), ("b.pt", "torch")
    assert told(ran) == [
        ("save_begin", *a), ("save_end", *a), ("save_begin", *b), ("save_end", *b),
        ("load_begin", *a), ("load_end", *a), ("load_begin", *b), ("load_end", *b),
    ]  # fmt: skip
    numbers = [event.data["numbers"] for event in ran.of("checkpoint.load_end")]
    assert numbers == [{"step": 7, "opt.state.0.step": 1}, {"epoch": 2}]
    assert {event.step for event in ran.of(*TRANSFERS)} == {1}
    assert ran.of("checkpoint.save_end")[0].data["blocked_s"] > 0
    assert "checkpoints" not in ran.of("agent.ended")[0].data["unseen"]


BUFFER = """
def to_file(path, contents):
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    with open(folder + path, "wb") as file: file.write(buffer.getvalue())
def step():
    model(torch.ones(1, 4)).sum().backward(); opt.step()
"""


def test_save_by_way_of_a_buffer(rank: Any) -> None:
    """A file that gets the bytes of a torch.save to a buffer is told as a save of the step at which the buffer was
    saved, before the next step, and a rename of it is told too."""
    ran = rank.run(
        PREPARE
        + BUFFER
        + """
to_file("/a.pt", {"step": 1})
with open(folder + "/last", "w") as file: file.write("a.pt")
step()
to_file("/b.tmp", {"step": 2})
os.replace(folder + "/b.tmp", folder + "/b.pt")
step()
to_file("/c.pt", {"step": 3})
"""
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    assert told(ran) == [
        (kind, name, "torch") for name in ("a.pt", "b.tmp", "c.pt") for kind in ("save_begin", "save_end")
    ]
    assert [event.step for event in ran.of("checkpoint.save_end")] == [1, 2, 3]
    assert all(event.data["ok"] and event.data["blocked_s"] > 0 for event in ran.of("checkpoint.save_end"))
    assert [event.data["to"].rpartition("/")[2] for event in ran.of("checkpoint.renamed")] == ["b.pt"]
    kinds = [event.kind.value for event in ran.events if event.kind.value in ("step", "checkpoint.save_end")]
    assert kinds == ["step", "checkpoint.save_end", "step", "checkpoint.save_end", "step", "checkpoint.save_end"]


def test_save_into_a_store(rank: Any) -> None:
    """The objects of the job's store are files of another process. An object that gets the bytes of a torch.save to a
    buffer is told as a save, each time that it is replaced; an older object with the same bytes is not, nor is one with
    other bytes."""
    objects = rank.folder / "objects"
    (objects / "saved" / "run").mkdir(parents=True)
    ran = rank.run(
        PREPARE
        + BUFFER
        + """
import subprocess
def put(key, data):
    subprocess.run(["tee", folder + "/objects/saved/run/" + key], input=data, stdout=subprocess.DEVNULL, check=True)
def bytes_of(contents):
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()
same = {"step": 1}
first = bytes_of(same)
put(".rclone_temp_put_1", first)  # an object that is not complete yet
step()
put("old.pt", first)
step()
os.utime(folder + "/objects/saved/run/old.pt", (1, 1))  # older than the next buffer
put("last.pt", bytes_of(same))
step()
put("last.pt", bytes_of({"step": 3}))
put("other.pt", bytes(len(bytes_of({"step": 4}))))
step()
""",
        env={"TORCHAOS_STORE": str(objects)},
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    ends = ran.of("checkpoint.save_end")
    names = [event.data["path"].removeprefix(f"{objects}/saved/run/") for event in ends]
    assert list(zip(names, [event.step for event in ends], strict=True)) == [
        ("old.pt", 1),
        ("last.pt", 3),
        ("last.pt", 4),
    ]


def test_save_and_load_of_an_open_object(rank: Any) -> None:
    """fsspec opens an object of a store as a file that has no name in the file system, but its URL as `full_name`."""
    ran = rank.run(
        PREPARE
        + """
class Opened(io.BytesIO):
    full_name = "s3://saved/run/a.pt"
file = Opened()
torch.save({"step": 7}, file)
file.seek(0)
torch.load(file)
""",
        env={"TORCHAOS_STORE": "/objects"},
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    assert told(ran) == [
        (kind, "a.pt", "torch") for kind in ("save_begin", "save_end", "load_begin", "load_end")
    ]  # fmt: skip
    assert {event.data["path"] for event in ran.of(*TRANSFERS)} == {"/objects/saved/run/a.pt"}


def test_the_url_of_an_object(agent_module: Callable[[str], Any], monkeypatch: Any, tmp_path: Any) -> None:
    """With a store, an S3 URL is reported as the file of the object; any other URL, and an S3 URL without a store, stay
    as they are."""
    absolute = agent_module("agent.saving.saved_files").absolute
    urls = ["s3://saved/run/step-1", "gs://saved/run/step-1"]
    monkeypatch.delenv("TORCHAOS_STORE", raising=False)
    assert list(map(absolute, urls)) == urls
    monkeypatch.setenv("TORCHAOS_STORE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = [str(tmp_path / "saved" / "run" / "step-1"), urls[1], str(tmp_path / "step-1")]
    assert list(map(absolute, [*urls, "step-1"])) == told


def test_file_with_other_bytes_than_the_buffer_is_no_save(rank: Any) -> None:
    """A file is no save if it is cut off, if it has the same size and other contents, or if its bytes are not those of
    a buffer; a save to a buffer that is never written is none either."""
    ran = rank.run(
        PREPARE
        + BUFFER
        + """
buffer = io.BytesIO()
torch.save({"step": 1}, buffer)
whole = buffer.getvalue()
with open(folder + "/cut.pt", "wb") as file: file.write(whole[:-1])
with open(folder + "/other.pt", "wb") as file: file.write(bytes(len(whole)))
with open(folder + "/text", "w") as file: file.write("1")
step(); step()
torch.save({"step": 3}, io.BytesIO())
step()
"""
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    assert told(ran) == []


def test_file_that_differs_from_the_buffer_in_its_first_tensor_is_no_save(rank: Any) -> None:
    """A checkpoint of 2,000 tensors is no save of a buffer that has the same size and differs in the first tensor."""
    ran = rank.run(
        PREPARE
        + BUFFER
        + """
contents = {str(number): torch.zeros(1) for number in range(2000)}
torch.save(contents, folder + "/archive.pt")
with open(folder + "/archive.pt", "rb") as file: saved = file.read()
contents["0"] += 1
buffer = io.BytesIO()
torch.save(contents, buffer)
assert len(saved) == len(buffer.getvalue())
with open(folder + "/copy.pt", "wb") as file: file.write(saved)
step()
with open(folder + "/right.pt", "wb") as file: file.write(buffer.getvalue())
step()
"""
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    assert {name for _, name, _ in told(ran)} == {"archive.pt", "right.pt"}


def test_save_and_load_that_fail(rank: Any) -> None:
    """What fails is told as not ok, and the error is the job's as ever."""
    ran = rank.run(
        PREPARE
        + """
for call in (lambda: torch.save(lambda: 0, folder + "/a.pt"), lambda: torch.load(folder + "/absent.pt")):
    try: call()
    except Exception as error: print(type(error).__name__)
"""
    )
    assert len(re.findall(r"^\w+Error$", ran.output, re.M)) == 2, ran.output
    assert [event.data["ok"] for event in ran.of("checkpoint.save_end", "checkpoint.load_end")] == [False, False]


def test_distributed_checkpoint(rank: Any) -> None:
    """torch.distributed.checkpoint is told once a call, by whatever name its functions were imported."""
    ran = rank.run(
        PREPARE
        + DCP
        + """
from torch.distributed.checkpoint import save
import torch.distributed.checkpoint as dcp
state = {"model": model.state_dict(), "step": 3}
save(state, checkpoint_id=folder + "/step-3")
dcp.save(state, storage_writer=dcp.FileSystemWriter(folder + "/step-4"))
state = {"model": model.state_dict(), "step": 0}
dcp.load(state, checkpoint_id=folder + "/step-3")
print(state["step"])
"""
    )
    assert ran.code == 0, ran.output
    assert ran.output.splitlines()[-1] == "3"
    assert told(ran) == [
        ("save_begin", "step-3", "dcp"), ("save_end", "step-3", "dcp"),
        ("save_begin", "step-4", "dcp"), ("save_end", "step-4", "dcp"),
        ("load_begin", "step-3", "dcp"), ("load_end", "step-3", "dcp"),
    ]  # fmt: skip
    assert ran.of("checkpoint.load_end")[0].data["numbers"] == {"step": 3}
    assert all(event.data["ok"] for event in ran.of("checkpoint.save_end", "checkpoint.load_end"))


def test_asynchronous_checkpoint(rank: Any) -> None:
    """An asynchronous save ends when its future is done; blocked is only what the training thread waited."""
    ran = rank.run(
        PREPARE
        + DCP
        + """
import threading, time
import torch.distributed.checkpoint as dcp
begun, go = threading.Event(), threading.Event()
class Slow(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        begun.set(); go.wait(300)
        return super().write_data(plan, planner)
future = dcp.async_save({"model": model.state_dict()}, storage_writer=Slow(folder + "/step-1"))
begun.wait(300)
model(torch.ones(1, 4)).sum().backward(); opt.step()
began = time.monotonic(); go.set(); future.result()
"""
    )
    assert ran.code == 0, ran.output
    kinds = [event.kind.value for event in ran.of("step", *TRANSFERS)]
    assert kinds == ["step", "checkpoint.save_begin", "step", "checkpoint.save_end"]
    begin, end = ran.of("checkpoint.save_begin")[0], ran.of("checkpoint.save_end")[0]
    assert (begin.step, end.step, end.data["ok"]) == (1, 1, True)
    assert end.data["blocked_s"] < end.mono_s - begin.mono_s


def test_optimizer_state_made_for_a_load(rank: Any) -> None:
    """torch.distributed.checkpoint steps an optimizer once to make its state; that is no iteration."""
    ran = rank.run(
        """
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
model = torch.nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
get_optimizer_state_dict(model, opt)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward(); opt.step()
"""
    )
    assert ran.code == 0, ran.output
    assert len(ran.steps) == 2
    assert [len(step["losses"]) for step in ran.steps] == [1, 1]


def test_numbers(agent_module: Callable[[str], Any]) -> None:
    """Step-like integers are found in nested containers; an optimizer's state is looked at once, cycles are bounded."""
    step_numbers = agent_module("agent.saving.checkpoint_hooks").step_numbers
    state = {n: {"step": 12.0} for n in range(1000)}
    loop: dict[str, Any] = {"iteration": 5, "lr": 0.1, "done": True, "step": "x"}
    loop["self"] = [loop, {"epoch": 1.5}]
    assert step_numbers({"optimizer": {"state": state}, "trainer": {"global_step": 30}}) == {
        "trainer.global_step": 30,
        "optimizer.state.0.step": 12,
    }
    assert step_numbers(loop)["iteration"] == 5
    assert step_numbers(None) == {}


def test_renames_of_what_was_saved_are_told(rank: Any) -> None:
    """By whatever call, of a file and of the folder that it is in; what this rank did not save is nobody's business."""
    ran = rank.run(
        PREPARE
        + """
import shutil
from os import replace
from pathlib import Path
for n in "abcd": torch.save({}, f"{folder}/{n}.tmp")
os.mkdir(folder + "/step.partial"); torch.save({}, folder + "/step.partial/x.pt")
Path(folder + "/a.tmp").rename(folder + "/a.pt")
replace(folder + "/b.tmp", folder + "/b.pt")
shutil.move(folder + "/c.tmp", folder + "/c.pt")
os.chdir(folder); os.rename("d.tmp", "d.pt"); os.rename("d.pt", "e.pt")
os.rename("step.partial", "step")
Path("other").write_text(""); os.rename("other", "more")
"""
    )
    assert ran.code == 0, ran.output
    names = [tuple(event.data[n].rpartition("/")[2] for n in ("path", "to")) for event in ran.of("checkpoint.renamed")]
    assert names == [
        ("a.tmp", "a.pt"), ("b.tmp", "b.pt"), ("c.tmp", "c.pt"), ("d.tmp", "d.pt"), ("d.pt", "e.pt"),
        ("step.partial", "step"),
    ]  # fmt: skip


def test_a_rename_is_told_when_it_was_done(rank: Any) -> None:
    """A rename that fails is none: the file is still known by its old name. A move to another file system is a copy."""
    ran = rank.run(
        """
import errno, os, shutil
original = os.rename
def rename(src, dst):
    if "elsewhere" in str(dst): raise OSError(errno.EXDEV, "another file system")
    original(src, dst)
os.rename = rename
"""
        + PREPARE
        + """
os.mkdir(folder + "/elsewhere")
for n in "ab": torch.save({}, f"{folder}/{n}.tmp")
for call in (os.rename, os.replace):
    try: call(folder + "/a.tmp", folder + "/missing/a.pt")
    except FileNotFoundError: pass
os.replace(folder + "/a.tmp", folder + "/a.pt")
shutil.move(folder + "/b.tmp", folder + "/elsewhere/b.pt")
"""
    )
    assert ran.code == 0, ran.output
    names = [tuple(event.data[n].rpartition("/")[2] for n in ("path", "to")) for event in ran.of("checkpoint.renamed")]
    assert names == [("a.tmp", "a.pt"), ("b.tmp", "b.pt")]


def test_a_load_of_a_file_that_does_not_exist(rank: Any) -> None:
    """A job may look for its checkpoint by a load: that the file does not exist is told apart from one that can't be
    read."""
    ran = rank.run(
        PREPARE
        + """
from pathlib import Path
Path(folder + "/torn.pt").write_bytes(b"no checkpoint")
for name in ("none.pt", "torn.pt"):
    try: torch.load(folder + "/" + name)
    except Exception: pass
"""
    )
    assert ran.code == 0, ran.output
    loads = [(event.data["ok"], event.data.get("missing")) for event in ran.of("checkpoint.load_end")]
    assert loads == [(False, True), (False, None)]


def test_removals_of_saved_files(rank: Any) -> None:
    """A file that was saved or loaded, or a folder with one, is told when it is gone: not before, not a file that stays
    under another name, and not one that was moved away. Other files are not told."""
    ran = rank.run(
        PREPARE
        + """
import shutil
from pathlib import Path
for n in "abcde": torch.save({}, f"{folder}/{n}.pt")
for n in ("one", "two"): os.mkdir(f"{folder}/{n}"); torch.save({}, f"{folder}/{n}/x.pt")
shutil.copy(folder + "/a.pt", folder + "/old.pt"); torch.load(folder + "/old.pt")
for call in (os.remove, shutil.rmtree):
    for path in (folder + "/missing", None, []):
        try: call(path)
        except (FileNotFoundError, TypeError): pass
os.remove(folder + "/a.pt"); os.unlink(folder + "/old.pt"); Path(folder + "/b.pt").unlink()
os.link(folder + "/c.pt", folder + "/kept.pt"); os.remove(folder + "/c.pt")
os.symlink(folder + "/two", folder + "/latest"); os.remove(folder + "/latest")
os.rename(folder + "/d.pt", folder + "/f.pt"); os.remove(folder + "/f.pt")
shutil.rmtree(folder + "/one"); shutil.rmtree(Path(folder + "/two"), ignore_errors=True)
Path("other").write_text(""); os.remove("other"); os.mkdir("empty"); shutil.rmtree("empty")
os.chdir(folder); os.remove("e.pt")
"""
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    names = [event.data["path"].rpartition("/")[2] for event in ran.of("checkpoint.removed")]
    assert names == ["a.pt", "old.pt", "b.pt", "f.pt", "one", "two", "e.pt"]


def test_removals_of_checkpoints_of_an_earlier_attempt(rank: Any) -> None:
    """This process has neither saved nor loaded them: it is told what goes in the folder of the checkpoints."""
    rank.checkpoints = str(rank.folder / "out")
    ran = rank.run(
        PREPARE
        + f"""
import shutil
from pathlib import Path
out = Path({rank.checkpoints!r}); (out / "step-5").mkdir(parents=True); (out / "step-5/x.pt").write_text("")
(out / "step-10.pt").write_text(""); (out.parent / "other").write_text("")
shutil.rmtree(out / "step-5"); (out / "step-10.pt").unlink(); (out / "none").unlink(missing_ok=True)
(out.parent / "other").unlink(); shutil.rmtree(out)
"""
    )
    assert ran.code == 0, ran.output
    names = [event.data["path"].rpartition("/")[2] for event in ran.of("checkpoint.removed")]
    assert names == ["step-5", "step-10.pt", "out"]


def test_a_forked_child_tells_what_it_saves(rank: Any) -> None:
    """It reports its saves, their renames and its end, but no load; a child that saves nothing reports nothing."""
    ran = rank.run(
        PREPARE
        + """
import multiprocessing
def write(name):
    torch.save({}, f"{folder}/{name}.tmp"); os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}.pt")
    torch.load(f"{folder}/{name}.pt")
if os.fork() == 0:
    write("a"); write("b"); os._exit(0)
os.wait()
fork = multiprocessing.get_context("fork")
for work in (lambda: write("c"), lambda: None, lambda: write("d/e")):  # the folder d is missing
    child = fork.Process(target=work); child.start(); child.join()
torch.save({}, folder + "/own.pt")
"""
    )
    assert ran.code == 0, ran.output
    told = [event for event in ran.events if event.kind.value.startswith("checkpoint.") and "own.pt" not in str(event)]
    names = [(event.kind.value.removeprefix("checkpoint."), event.data.get("ok")) for event in told]
    whole = [("save_begin", None), ("save_end", True), ("renamed", None)]
    end, failed = ("writer_ended", None), [("save_begin", None), ("save_end", False)]
    assert names == [*whole, *whole, end, *whole, end, *failed]
    assert len({event.data["child"] for event in told if "child" in event.data}) == 3
    assert {event.data["blocked_s"] for event in told if event.kind.value == "checkpoint.save_end"} == {0.0}
    assert not ran.failures
    assert "child" not in ran.of("checkpoint.save_end")[-1].data
