"""The packages that the guides write are found, loaded and run like what comes with torchaos."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from torchaos.harness.mechanics.site import OutsideSite, Victim
from torchaos.harness.undo.handles import from_json, to_json

from .conftest import REPOSITORY, Torchaos, blocks

GUIDES = REPOSITORY / "docs"
MOST_LINES = 40


def test_the_examples_are_short() -> None:
    """An injector takes less than 40 lines, as the guide promises by showing one."""
    files = [block for page in ("write-an-injector", "write-an-assertion")
             for block in blocks("python", [GUIDES / f"{page}.md"]) if block.name]  # fmt: skip
    assert [block.name for block in files] == ["straggler/faults.py", "strict/asserts.py"]
    assert max(len(block.text.splitlines()) for block in files) < MOST_LINES


def test_list_shows_them(torchaos: Torchaos) -> None:
    """What another package offers by entry point stands in the list, with its parameters."""
    done = torchaos("list")
    assert done.returncode == 0, done.stderr
    assert "straggler.pause" in done.stdout
    assert "length = 2.0" in done.stdout
    assert "final_loss" in done.stdout
    assert "most (required)" in done.stdout


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


@pytest.mark.job
def test_they_work(torchaos: Torchaos, tmp_path: Path) -> None:
    """A real job under the guide's injector: it lands and is felt, nothing restarts, and the guide's assertion judges,
    once for and once against the same run."""
    run = _run(torchaos, tmp_path)
    assert run["exit_code"] == 0, run
    (fault,) = run["faults"]
    assert fault["inject"] == "straggler.pause"
    assert fault["applied"].startswith("step 6, forward")
    assert "no rank finished a step for 1.5" in fault["evidence"], fault
    cases = {case["name"]: case for case in run["cases"]}
    assert cases["restarts"]["measured"]["restarts"] == 0
    assert cases["final_loss"]["reason"].startswith("no rank's loss was above")

    plan = Path(run["run_dir"]) / "plan.json"
    plan.write_text(plan.read_text().replace('"most": 9.5', '"most": 0.0'))
    again = torchaos("judge", run["run_dir"], "--json", "again.json")
    assert again.returncode == 1, again.stdout + again.stderr
    (result,) = json.loads((tmp_path / "again.json").read_text())["results"]
    assert "ended with a loss of" in result["reason"]


def _run(torchaos: Torchaos, folder: Path) -> dict[str, Any]:
    """The scenario of the guide to injectors, judged by the assertions of both guides."""
    both: list[dict[str, Any]] = [
        yaml.safe_load(blocks("yaml", [GUIDES / f"write-an-{name}.md"])[0].text) for name in ("injector", "assertion")
    ]
    shutil.copy(REPOSITORY / "tests" / "trainers" / "plain_ddp.py", folder / "train.py")
    job = {"command": f"{both[0]['job']['command']} --steps 10 --dir {{run}}/out", "timeout": "2m"}
    scenario = {**both[0], "job": job, "assert": both[0]["assert"] + both[1]["assert"]}
    (folder / "one-straggler.yaml").write_text(yaml.safe_dump(scenario, sort_keys=False))
    done = torchaos("run", "one-straggler.yaml", "--json", "all.json")
    assert (folder / "all.json").exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "all.json").read_text())["results"][0]
    return found
