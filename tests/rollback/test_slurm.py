"""The handle of work that was given to Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
import slurm_programs

from torchaos.harness.rollback.cluster_handles import SlurmWork


def test_an_allocation_that_is_long_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm forgets a job some minutes after its end; then nothing of it is left."""
    slurm_programs.install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert SlurmWork("run-1", "99").is_undone()


def test_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody can be asked, nothing is verified."""
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match="Unable to contact"):
        SlurmWork("run-1").is_undone()


@pytest.mark.parametrize(("name", "job"), [("", ""), ("run-1", "7; rm"), ("", "7")])
def test_work_without_a_name(name: str, job: str) -> None:
    """A handle that would find the work of others is refused."""
    with pytest.raises(ValueError, match="work of Slurm"):
        SlurmWork(name, job)
