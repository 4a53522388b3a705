"""Checkpoints to damage, and a site for the fault; and the ideal trainer of the assertions' tests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ideal import trainer
from torch.distributed.checkpoint.state_dict_saver import save

from torchaos.harness import registry
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.interfaces import Handle, Target
from torchaos.harness.protocol.wire import Event, Kind, Phase

__all__ = ["trainer"]

Snapshot = dict[Path, tuple[str, int, int]]


class Operation:
    """One injector at work on the checkpoints under `root`, as the engine has it."""

    def __init__(
        self, name: str, root: Path, seed: int = 3, target: Target | None = None, phase: Phase | None = None,
        **params: Any,
    ) -> None:  # fmt: skip
        self.events: list[tuple[Kind, Mapping[str, Any]]] = []
        copies = root.parent / "undo"
        copies.mkdir(exist_ok=True)
        made = registry.find("injectors", name)(**params)
        self.injector = made.plan(target or Target(()), random.Random(seed))
        self.site = OutsideSite("damage", (), self._emit, phase=phase, checkpoints=root, undo_copies=copies)
        self.handles: Sequence[Handle] = ()

    def apply(self) -> Operation:
        self.handles = self.injector.changes(self.site)
        self.injector.apply(self.site)
        return self

    def take_back(self) -> bool:
        for handle in reversed(self.handles):
            handle.undo()
        return all(handle.is_undone() for handle in self.handles)

    @property
    def damaged(self) -> list[Mapping[str, Any]]:
        return [data for _kind, data in self.events if data.get("what") == "damaged"]

    def _emit(self, kind: Kind, data: Mapping[str, Any]) -> Event:
        self.events.append((kind, data))
        return Event(kind, "harness", len(self.events), 0.0, 0.0, data=data)


def snapshot(root: Path) -> Snapshot:
    """Contents, mode and time of change of every file."""
    found = {path: path.stat() for path in sorted(root.rglob("*")) if path.is_file()}
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), stat.st_mode, stat.st_mtime_ns)
        for path, stat in found.items()
    }


@pytest.fixture
def operate() -> Callable[..., Operation]:
    return Operation


def state_of(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    moments = {"m": torch.randn(70).bfloat16(), "v": torch.randn(3000)}
    return {"weight": torch.randn(60, 50), "moments": moments, "step": step}


@pytest.fixture
def dcp_root(tmp_path: Path) -> Path:
    """Two DCP checkpoints, and one that was never finished."""
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        save(state_of(step), checkpoint_id=root / f"step-{step}", no_dist=True)
    save(state_of(30), checkpoint_id=root / "step-30.partial", no_dist=True)
    return root


@pytest.fixture
def ranked_root(tmp_path: Path) -> Path:
    """Two checkpoints of two ranks' files, and a tracker, as DeepSpeed lays them out."""
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        folder = root / f"global_step{step}"
        folder.mkdir(parents=True)
        torch.save({"module": state_of(step)["weight"], "global_steps": step}, folder / "mp_rank_00_model_states.pt")
        for rank in (0, 1):
            state = {"optimizer_state_dict": state_of(100 * step + rank)["moments"]}
            torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step20")
    return root


@pytest.fixture
def torch_root(tmp_path: Path) -> Path:
    """Two files of torch.save."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    for step in (10, 20):
        torch.save(state_of(step), root / f"step-{step}.pt")
    return root
