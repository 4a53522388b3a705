"""Deltas: a checkpoint that holds only what changed is whole if all on which it builds is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torchaos.harness.checkpoints import inventory
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.verify import Verified, verify
from torchaos.harness.checkpoints.verify.all_checks import Answer


def state(**more: Any) -> dict[str, Any]:
    tensors = {"model": {"w": torch.arange(64.0)}, "optimizer": {"exp_avg": torch.zeros(64)}}
    return {**tensors, "step": 1, "lr": 0.1, "rng": 3, **more}


def saved(folder: Path, **builds_on: str | None) -> None:
    """A chain of files, each of which names the one before it."""
    for name, base in builds_on.items():
        torch.save(state(**({"base": base} if base else {})), folder / f"{name.replace('_', '-')}.pt")


def verified(path: Path) -> Verified:
    files = Local()
    try:
        return verify(files, str(path))
    finally:
        files.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"\0\0\x80\x3f\0\0\0\x40")] ^= 4  # 1.0, 2.0
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path, step_10=None, step_12="step-10", step_14="step-12.pt", step_16="./step-14.pt")
    return tmp_path


DAMAGES: dict[str, tuple[Callable[[Path], object], Answer]] = {
    "nothing": (lambda path: None, Answer.WHOLE),
    "flipped": (flip, Answer.DAMAGED),
    "missing": (Path.unlink, Answer.INCOMPLETE),
    "set aside": (lambda path: path.rename(path.with_name(f"{path.name}.damaged")), Answer.INCOMPLETE),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:600]), Answer.INCOMPLETE),
    "empty": (lambda path: path.write_bytes(b""), Answer.INCOMPLETE),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("link", [10, 12, 14])
def test_a_chain_is_as_whole_as_its_links(folder: Path, link: int, damage: str) -> None:
    """The base or a link between is damaged: what builds upon it is not whole, and the reason names the link. What does
    not build upon it is."""
    change, answer = DAMAGES[damage]
    change(folder / f"step-{link}.pt")
    found = verified(folder / "step-16.pt")
    assert found.answer is answer, found.problems
    if damage != "nothing":
        assert all(f"step-{link}" in problem.text for problem in found.problems)
        assert found.problems[0].text.startswith("it builds upon") or "which is missing" in found.problems[0].text
    for other in (10, 12, 14):
        if other < link:
            assert verified(folder / f"step-{other}.pt").answer is Answer.WHOLE


def test_the_inventory_tells_it_of_each(folder: Path) -> None:
    """What assertions are told of: the checkpoints after the bad link are not whole, and that before is."""
    flip(folder / "step-12.pt")
    taken = inventory.take(folder)
    good = {one["path"]: not one["problem"] for one in taken["checkpoints"]}
    assert good == {"step-10.pt": True, "step-12.pt": False, "step-14.pt": False, "step-16.pt": False}
    assert taken["checkpoints"][3]["builds_on"] == ["step-14.pt", "step-12.pt", "step-10.pt"]
    (folder / "step-12.pt").unlink()
    missing = inventory.take(folder)["checkpoints"]
    assert [one["complete"] for one in missing] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "entries", "answer"),
    [
        ("step-20", {"base": "step-10"}, Answer.WHOLE),
        ("step-20", {"base_step": 10}, Answer.WHOLE),
        ("step-20", {"delta_of": "step-99.pt"}, Answer.INCOMPLETE),
        ("delta-20", {"base": 99}, Answer.INCOMPLETE),
        ("delta-20", {"previous": "step-10.pt"}, Answer.WHOLE),
        ("delta-20", {"parent": "step-99"}, Answer.INCOMPLETE),
        ("step-20", {"kind": "delta", "parent_checkpoint": "/gone/ckpt/step-99.pt"}, Answer.INCOMPLETE),
        ("step-20", {"chain": ["step-10.pt", "step-99.pt", "step-20.pt"]}, Answer.INCOMPLETE),
        ("step-20", {"chain": ["step-10.pt", "step-14.pt", "step-20.pt"]}, Answer.WHOLE),
        ("step-20", {"mode": "diff", "prev": "step-99"}, Answer.INCOMPLETE),
        ("diff-20", {}, Answer.UNTOLD),
        ("diffusion-20", {}, Answer.WHOLE),
        ("step-20", {"is_delta": True}, Answer.UNTOLD),  # of which one?
        ("step-20", {"full": False}, Answer.UNTOLD),
        ("delta-20", {}, Answer.UNTOLD),
        ("step-20", {"previous": "step-99"}, Answer.WHOLE),  # it only tells what came before it
        ("step-20", {"base": 10000}, Answer.WHOLE),  # of an encoding of positions
        ("step-20", {"base": "resnet50"}, Answer.WHOLE),
        ("step-20", {"base_checkpoint": "/models/llama/step-1000.pt"}, Answer.WHOLE),  # a training began with it
        ("step-20", {"min_delta": 0.1, "delta": 1.0, "kind": "cosine", "full": True}, Answer.WHOLE),
    ],
)
def test_what_a_checkpoint_tells_of_its_base(folder: Path, name: str, entries: dict[str, Any], answer: Answer) -> None:
    """Only an entry that names a checkpoint is a link; only what says that it is a delta must have one."""
    torch.save(state(**entries), folder / f"{name}.pt")
    found = verified(folder / f"{name}.pt")
    assert found.answer is answer, (found.problems, found.unseen)


def test_a_chain_that_leads_back_to_itself(tmp_path: Path) -> None:
    """Nobody can load it."""
    saved(tmp_path, step_1="step-2", step_2="step-1")
    assert "builds upon it" in verified(tmp_path / "step-1.pt").problems[0].text
    saved(tmp_path, step_3="step-3")  # its own name is no link
    assert verified(tmp_path / "step-3.pt").answer is Answer.WHOLE


def test_folders_whose_ranks_or_manifest_name_the_base(tmp_path: Path) -> None:
    """A folder of files of ranks, and one of safetensors with a manifest, each on a base that is a folder."""
    for step, base in ((10, None), (20, "step-10")):
        for rank in range(2):
            (tmp_path / f"step-{step}").mkdir(exist_ok=True)
            torch.save(state(**({"base": base} if base else {})), tmp_path / f"step-{step}" / f"rank-{rank}.pt")
    plain = tmp_path / "step-30"
    plain.mkdir()
    save_file({"w": torch.ones(4)}, plain / "model.safetensors")
    (plain / "manifest.json").write_text(json.dumps({"base": "step-20", "step": 30}))
    assert not verified(plain).problems
    (tmp_path / "step-10" / "rank-1.pt").write_bytes(b"")
    for step in (20, 30):
        assert verified(tmp_path / f"step-{step}").answer is Answer.INCOMPLETE
    inner = {"base": "rank-0.pt", "step": 10}  # a file of its own
    (tmp_path / "step-10" / "manifest.json").write_text(json.dumps(inner))
    assert not any("missing" in problem.text for problem in verified(tmp_path / "step-10").problems)
    shutil.rmtree(tmp_path / "step-10")
    assert [problem.text for problem in verified(plain).problems] == [
        "it builds upon step-20: it builds upon step-10, which is missing"
    ]
