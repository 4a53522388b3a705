"""`torchaos explore` with the reference job: all states are right; without the rename in its save, the bug is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.timeout(3000)]

JOBS = Path(str(files("torchaos.scenarios") / "jobs"))

# Saves under the final name at once, and trusts the newest name when it starts.
NO_RENAME = f"""
import runpy, sys
sys.path.insert(0, {str(JOBS)!r})
import fault_tolerance
import torch.distributed as dist

def save(self, step, parts):
    self.wait()
    final = self.folder / f"step-{{step}}"
    writing = fault_tolerance.async_save(dict(parts), checkpoint_id=final, process_group=self.group)
    self.pending = self.finisher.submit(writing.result)

def newest(self):
    found = self._complete()
    return {{"step": int(found[0].name[5:]), "world_size": dist.get_world_size()}} if found else None

fault_tolerance.Checkpoints.save, fault_tolerance.Checkpoints._newest = save, newest
runpy.run_path({str(JOBS / "gpt_ddp.py")!r}, run_name="__main__")
"""

REFERENCE = "--steps 9 --checkpoint-every 4 --checkpoint-dir {run}/checkpoints"
ASSERTS = [
    "checkpoint_integrity", "loss_continuity", "parameter_digest", "sample_accounting", "no_lost_work",
    "state_restored",
]  # fmt: skip
PLAIN = Path(__file__).parents[1] / "trainers" / "plain_ddp.py"


def _explore(
    folder: Path,
    script: str,
    *options: str,
    words: str = REFERENCE,
    asserts: list[str] = ASSERTS,
    checkpoints: str = "{run}/checkpoints",
) -> tuple[int, dict[str, Any], str]:
    scenario = {
        "scenario": "explored", "seed": 7,
        "job": {
            "command": f"torchrun --nproc-per-node 2 {script} {words}",
            "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            "checkpoints": {"path": checkpoints}, "timeout": "10m",
        },
        "assert": asserts,
    }  # fmt: skip
    file, out = folder / "scenario.yaml", folder / "out.json"
    file.write_text(yaml.safe_dump(scenario))
    argv = [sys.executable, "-m", "torchaos.harness", "explore", str(file), "--out", str(folder / "explored")]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        [*argv, "--json", str(out), "--junit", str(folder / "junit.xml"), *options], env=env, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert out.is_file(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_the_reference_job_survives_each_death(tmp_path: Path) -> None:
    """All states that the death of all processes can leave are resumed correctly, by forked ranks that were checked
    against a cold start; the states of a loss of power too."""
    code, found, said = _explore(
        tmp_path, "{jobs}/gpt_ddp.py", "--states", "16", "--model", "process-death", "--model", "power-loss-strict"
    )
    assert code == 0, said
    assert found["classes"] == {"resumed correctly": 16}, said
    assert not found["fatal_share"]  # None: no state of a death of all processes was drawn
    assert found["started"].startswith("by forking ranks"), said
    assert sum(one["warm"] for one in found["outcomes"]) == 15  # the first was resumed both ways
    assert {one["from_step"] for one in found["outcomes"]} >= {0, 4}
    assert (Path(found["result"]["run_dir"]) / "report.html").is_file()


def test_a_save_without_a_rename_is_found(tmp_path: Path) -> None:
    """Without the rename, a death in the middle of a save leaves a newest folder that can't be loaded. The job does not
    start again, a cold start shows it, and so does the script without torchaos."""
    (tmp_path / "train.py").write_text(NO_RENAME)
    code, found, said = _explore(tmp_path, str(tmp_path / "train.py"), "--states", "5")
    assert code == 1, said
    broken = [one for one in found["outcomes"] if one["kind"] == "won't start"]
    assert broken, said
    assert found["result"]["decided_by"] == "won't start"
    assert not any(one["warm"] or one["mended"] for one in broken)
    assert found["fatal_share"] > 0
    kept = next(one for one in broken if one["run_dir"])
    assert any(what != "complete" for _path, what in kept["files"])
    again = subprocess.run(["sh", Path(kept["run_dir"], "reproduce.sh")], capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert "Error" in again.stderr + again.stdout
    judged = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "judge", kept["run_dir"]], capture_output=True, check=False
    )
    assert judged.returncode == 1


def test_a_second_death(tmp_path: Path) -> None:
    """The plain loop is right after each death, and after each second death while it resumes from its first checkpoint:
    it goes on from this checkpoint, or from the next."""
    asserts = ["loss_continuity", "sample_accounting", "no_lost_work"]
    words = "--steps 8 --save-every 3 --dir {run}/checkpoints"
    code, found, said = _explore(tmp_path, str(PLAIN), words=words, asserts=asserts)
    assert (code, found["classes"]) == (0, {"resumed correctly": found["states"]}), said
    first = found["result"]["run_dir"]
    after = next(one["state"] for one in found["outcomes"] if one["from_step"] == 3)
    again = ["--resume", first, "--after", after]
    code, found, said = _explore(tmp_path, str(PLAIN), *again, words=words, asserts=asserts)
    assert Path(found["result"]["run_dir"]) == Path(first, "again", after)
    assert (code, found["classes"]) == (0, {"resumed correctly": found["states"]}), said
    assert {one["from_step"] for one in found["outcomes"]} >= {3, 6}


@pytest.mark.parametrize("name_first", [False, True])
def test_checkpoints_in_an_object_store(tmp_path: Path, name_first: bool) -> None:
    """A job that keeps its checkpoints in S3 gets a store, and each state is one of whole objects. If the newest
    checkpoint is named after all parts are there, all states are right. If it is named before, the job does not start
    from the states between, whatever the order of the ranks."""
    trainer = Path(__file__).parents[1] / "trainers" / "s3_ddp.py"
    words = "--store s3://saved/run --steps 8 --save-every 3" + " --name-first" * name_first
    code, found, said = _explore(tmp_path, str(trainer), words=words, checkpoints="s3://saved/run")
    assert code == int(name_first), said
    operations = {one["last_operation"].split(": ", 1)[-1].partition(" (")[0] for one in found["outcomes"]}
    assert operations <= {"", *(f"put step-{step}/rank-{rank}.pt" for step in (3, 6) for rank in (0, 1)), "put newest"}
    # Without a name: 9 states. The name comes first in 2 saves, and then 3 states lack a part of either rank, or both.
    expected = {"resumed correctly": 5, "won't start": 6} if name_first else {"resumed correctly": 9}
    assert found["classes"] == expected, said
    assert "by forking ranks" in said
