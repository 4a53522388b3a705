"""The packages that the guides write are found, loaded and run like torchaos's own plug-ins."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

import torchaos.plugin as face
from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers.site import OutsideSite, Victim
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.rollback.handles import from_json, to_json

from .conftest import REPOSITORY, Torchaos, blocks

GUIDES = REPOSITORY / "docs"
MOST_LINES = 40


def test_the_examples_are_short() -> None:
    """An injector takes less than 40 lines, as the guide shows, and so do the others but for a checkpoint format."""
    lengths = {block.name: len(block.text.splitlines()) for block in blocks("python", sorted(GUIDES.glob("*.md")))}
    assert lengths.pop("arrays/formats.py") < 60
    files = [
        "onsite/conditions.py",
        "polite/launchers.py",
        "shelf/formats.py",
        "straggler/faults.py",
        "strict/asserts.py",
    ]
    assert sorted(filter(None, lengths)) == files
    assert max(lengths.values()) < MOST_LINES


def test_the_examples_import_the_public_face_alone() -> None:
    """Of torchaos, both guides import nothing but torchaos.plugin."""
    text = "".join((GUIDES / f"write-an-{name}.md").read_text() for name in ("injector", "assertion"))
    deeper = re.findall(r"torchaos\.(?:harness|injectors)[.\w]*", text)
    assert set(deeper) <= {"torchaos.injectors"}  # the group of entry points


def test_the_guide_explains_every_part() -> None:
    """What an injector may declare and do, each base class, each handle and each proof that plug-ins get is named."""
    text = (GUIDES / "write-an-injector.md").read_text()
    parts = [name for name in {**vars(Fault), **Fault.__annotations__} if not name.startswith("_")]
    ours = [name for name in face.__all__ if name.endswith(("Fault", "Death")) or hasattr(getattr(face, name), "kind")]
    assert [name for name in (*parts, *ours) if f"`{name}" not in text] == []


def test_list_shows_them(torchaos: Torchaos) -> None:
    """What another package offers by entry point stands in the list, with its parameters."""
    done = torchaos("list", "-v")
    assert done.returncode == 0, done.stderr
    assert "straggler.pause" in done.stdout
    assert "length = 2.0" in done.stdout
    assert "final_loss" in done.stdout
    assert "most (required)" in done.stdout
    assert "Starts the command on this machine, with a lower priority." in " ".join(done.stdout.split())
    assert "Files of numpy.savez." in done.stdout
    assert "file_exists" in done.stdout


def test_the_way_back_of_the_guide_is_one_that_can_be_guarded() -> None:
    """The `changes` that is shown by itself gives handles, which go through the JSON of the undo record."""
    (part,) = [one for one in blocks("python", [GUIDES / "write-an-injector.md"]) if not one.name]
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{textwrap.dedent(part.text)}", namespace)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (handle,) = namespace["changes"](None, OutsideSite("it", [Victim(child.pid, 0, None)], Mock()))
        assert from_json(json.loads(json.dumps(to_json(handle)))) == handle
        assert (handle.pid, handle.action) == (child.pid, "resume")
    finally:
        child.communicate(b"\n")


def test_the_format_is_verified_to_the_bit(torchaos: Torchaos, tmp_path: Path) -> None:
    """A file that NumPy wrote is whole; a flipped bit is named, and a file that was cut off is torn."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step in (10, 20, 30):
        np.savez(folder / f"step-{step}.npz", weight=weight, steps=np.arange(4))
    whole = (folder / "step-20.npz").read_bytes()
    place = whole.index(weight.tobytes()) + 4 * 4 + 3  # the highest byte of element (1, 1), which is 4.0 = 0x40800000
    (folder / "step-20.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
    (folder / "step-30.npz").write_bytes(whole[:-100])

    done = torchaos("verify", "--all", "--json", folder)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {Path(one["path"]).name: one for one in json.loads(done.stdout)["checkpoints"]}
    assert {name: (one["format"], one["step"], one["verdict"]) for name, one in found.items()} == {
        "step-10.npz": ("npz", 10, "whole"),
        "step-20.npz": ("npz", 20, "damaged"),
        "step-30.npz": ("npz", 30, "incomplete"),
    }
    (cut,) = found["step-30.npz"]["problems"]
    assert cut["kind"] == "torn"
    (flipped,) = found["step-20.npz"]["problems"]
    assert (flipped["tensor"], flipped["element"], flipped["bits"]) == ("weight", [1, 1], [30])


def test_a_folder_of_the_guide_is_read_and_what_is_missing_is_named(torchaos: Torchaos, tmp_path: Path) -> None:
    """Each array of a whole folder is read; a file that is gone, and one that was cut off, are problems of theirs."""
    weight, names = np.arange(6, dtype=np.float32).reshape(2, 3), ("weight", "bias", "scale")
    for step in (10, 20):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.raw").write_bytes(weight.tobytes())
        (folder / "arrays.json").write_text(json.dumps({name: ["float32", [2, 3]] for name in names}))
    (folder / "bias.raw").unlink()
    (folder / "scale.raw").write_bytes(weight.tobytes()[:-1])

    done = torchaos("verify", "--all", "--json", tmp_path / "checkpoints")
    found = {Path(one["path"]).name: one for one in json.loads(done.stdout)["checkpoints"]}
    assert {name: (one["format"], one["step"], one["tensors"]) for name, one in found.items()} == {
        "step-10": ("shelf", 10, 3),
        "step-20": ("shelf", 20, 1),
    }
    assert not found["step-10"]["problems"]
    texts = sorted((one["kind"], one["text"]) for one in found["step-20"]["problems"])
    assert texts == [
        ("torn", "bias.raw: missing"),
        ("torn", "scale: it has 23 bytes, and the list says otherwise"),
    ]


def test_the_condition_holds_when_its_probe_has_seen_the_file(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nobody made the file, nothing is known; once it is there, the condition holds."""
    monkeypatch.syspath_prepend(str(plugins))
    condition = importlib.import_module("onsite.conditions").FileExists(str(tmp_path / "stop"))
    (probe,) = condition.probes(None)
    events: list[Event] = []

    def emit(kind: Kind, data: Mapping[str, Any]) -> Event:
        events.append(Event(kind, "it", len(events), 0.0, 0.0, data=data))
        return events[-1]

    probe.sample(emit)
    assert condition.holds(events, 0.0) is None
    (tmp_path / "stop").touch()
    probe.sample(emit)
    assert condition.holds(events, 0.0) is True


@pytest.mark.job
def test_they_work(torchaos: Torchaos, tmp_path: Path) -> None:
    """A real job under the guide's launcher and injector: the fault lands and is felt, nothing restarts, and the
    guide's assertion judges, once for and once against the same run."""
    run = _run(torchaos, tmp_path)
    assert run["exit_code"] == 0, run
    (fault,) = run["faults"]
    assert fault["inject"] == "straggler.pause"
    assert fault["applied"].startswith("step 6, forward")
    paused = re.search(r"no rank finished a step for ([\d.]+) s", fault["evidence"])
    assert paused, fault
    assert float(paused[1]) >= 1.5
    cases = {case["name"]: case for case in run["cases"]}
    assert cases["restarts"]["measured"]["restarts"] == 0
    assert cases["final_loss"]["reason"].startswith("no rank's loss was above")

    log = Path(run["run_dir"], "logs", "job-0.log").read_text()
    assert f"niceness {os.nice(0) + 3}" in log

    plan = Path(run["run_dir"]) / "plan.json"
    plan.write_text(plan.read_text().replace('"most": 9.5', '"most": 0.0'))
    again = torchaos("judge", run["run_dir"], "--json", "again.json")
    assert again.returncode == 1, again.stdout + again.stderr
    (result,) = json.loads((tmp_path / "again.json").read_text())["results"]
    assert "ended with a loss of" in result["reason"]


def _run(torchaos: Torchaos, folder: Path) -> dict[str, Any]:
    """The scenario of the guide to injectors, under the launcher of its guide, judged by the assertions of both guides,
    and stopped by nobody."""
    both: list[dict[str, Any]] = [
        yaml.safe_load(blocks("yaml", [GUIDES / f"write-an-{name}.md"])[0].text) for name in ("injector", "assertion")
    ]
    trainer = (REPOSITORY / "tests" / "trainers" / "plain_ddp.py").read_text()
    (folder / "train.py").write_text(f"{trainer}    print('niceness', os.nice(0), flush=True)\n")
    job = {"command": f"{both[0]['job']['command']} --steps 10 --dir {{run}}/out", "timeout": "5m", "niceness": 3}
    scenario = {**both[0], "job": job, "assert": both[0]["assert"] + both[1]["assert"]}
    scenario |= {"launcher": "polite", "stop": [{"file_exists": {"path": str(folder / "stop")}}]}
    (folder / "one-straggler.yaml").write_text(yaml.safe_dump(scenario, sort_keys=False))
    done = torchaos("run", "one-straggler.yaml", "--json", "all.json")
    assert (folder / "all.json").exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "all.json").read_text())["results"][0]
    return found
