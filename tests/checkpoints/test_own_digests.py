"""Digests of its own files that a checkpoint contains."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.inventory import entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    found = tmp_path / "step-5"
    found.mkdir()
    (found / "state.json").write_text(json.dumps({"step": 5}))
    (found / "more.json").write_text(json.dumps({"lr": 0.5}))
    return found


def _values(folder: Path, told: dict[str, str]) -> dict[str, str]:
    (folder / "digests.json").write_text(json.dumps(told))
    values = entry(Local(), str(folder), str(folder.parent))["values"]
    return {name.partition(":")[2]: text for name, text in values.items() if name.startswith("digests.json:")}


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha256", "sha512", "blake2b"])
def test_a_right_digest_is_told_as_such(folder: Path, algorithm: str) -> None:
    """Whatever its algorithm, so that files of equal contents and other bytes compare as equal."""
    digest = hashlib.new(algorithm, (folder / "state.json").read_bytes()).hexdigest()
    for name in ("state.json", "files.state.json", "state.json.sha"):
        assert _values(folder, {name: digest}) == {name: "the digest of state.json"}


def test_any_other_stays_as_it_is(folder: Path) -> None:
    """A digest of another file, a wrong one, and one under a name that speaks of no file."""
    digest = hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()
    told = {"more.json": digest, "state.json": "0" * 64, "data": digest, "step": "abc"}
    assert _values(folder, told) == {name: repr(text) for name, text in told.items()}
