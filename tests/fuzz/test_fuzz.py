"""A sample of the inputs of `python lab/campaigns/fuzz.py`, drawn by Hypothesis, and every input that once did harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mutating.guard import Guard
from mutating.inputs import CORPUS
from mutating.targets import TARGETS, Target, UndoTarget

from torchaos.harness.rollback.handles import REGISTRY

CAMPAIGN = Path(__file__).parents[2] / "lab" / "campaigns" / "fuzz.py"


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.remove()


@pytest.fixture(scope="module", params=TARGETS, ids=[one.name for one in TARGETS])
def target(request: pytest.FixtureRequest, guard: Guard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made: Target = request.param(tmp_path_factory.mktemp("fuzz").resolve(), guard)
    yield made
    made.end()


def test_whole_inputs_are_taken(target: Target) -> None:
    """What the damaged ones are made from does no harm itself, nor do the inputs that once did."""
    for raw in target.bases():
        assert target.try_one(raw) == []


@settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink],
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(draw=st.randoms(use_true_random=False))
def test_damaged_inputs_do_no_harm(target: Target, draw: Random) -> None:
    """Bytes or values damaged anywhere: no other exception, no hang, nothing touched outside the run directory."""
    assert target.try_one(target.draw(draw)) == []


def test_the_guard_sees_harm(guard: Guard, tmp_path: Path) -> None:
    """What the others rely on: a write outside, a new process and a signal to a stranger are refused, and told."""
    inside = tmp_path / "inside"
    inside.mkdir()
    deeds: list[Callable[[], object]] = [
        lambda: (tmp_path / "outside").write_text("x"),
        lambda: (inside / ".." / "outside").mkdir(),
        lambda: subprocess.run(["true"], check=False),
        lambda: os.kill(os.getppid(), 0),
        lambda: os.rename(inside, tmp_path / "moved"),
    ]
    for deed in deeds:
        with guard.watching(inside, 20.0), pytest.raises(OSError, match="refused"):
            deed()
        assert len(guard.harm) == 1
    with guard.watching(inside, 20.0):
        (inside / "file").write_text("x")
    assert guard.harm == []


def test_the_corpus_is_that_of_a_target() -> None:
    """A regression input in a folder that no target reads would never be tried."""
    assert {path.name for path in CORPUS.iterdir()} <= {one.name for one in TARGETS} | {"run"}


def test_a_target_that_is_not_there() -> None:
    """One clear error, not a campaign of no inputs that found nothing."""
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--only", "nope"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no target nope; there are: scenario, " in done.stderr


def test_every_kind_of_handle_is_damaged(guard: Guard, tmp_path: Path) -> None:
    """The undo log that damaged ones are made from names each kind there is."""
    target = UndoTarget(tmp_path.resolve(), guard)
    target.end()
    records = [json.loads(line) for raw in target.whole.values() for line in raw.splitlines()]
    assert {one["kind"] for record in records for one in record.get("handles", ())} == set(REGISTRY)


@pytest.mark.long
def test_the_campaign(tmp_path: Path) -> None:
    """The command itself, with 3,000 inputs: exit code 0, and nothing found."""
    command = [sys.executable, str(CAMPAIGN), "--inputs", "3000", "--seed", "12345", "--found", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "found").exists()
