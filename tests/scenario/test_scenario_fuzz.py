"""Loading a file of any bytes ends soon, in a scenario or in one clear error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torchaos.harness.interfaces import UsageError
from torchaos.harness.scenario.loader import load

WHOLE = b"""\
scenario: kill-twice
seed: 7
job:
  command: torchrun --nproc-per-node 2 {jobs}/gpt_ddp.py --checkpoint-dir {run}/checkpoints
  env: {A: "1"}
  checkpoints: {path: "{run}/checkpoints"}
  timeout: 5m
faults:
  - inject: process.terminate
    id: first
    target: {rank: any}
    when: {step: {between: [10, 30]}, phase: any}
    with: {grace: 10s}
  - inject: process.kill
    target: {percent: 50}
    when: {after: first, state: recovered, delay: 2s}
assert:
  - recovery_time: {catch_up: 60s}
  - loss_continuity
steady_state: [steps: {at_least: 3}]
twin: {runs: 1}
"""
# What has been a trap: control characters, escapes, tags, aliases, brackets, words of YAML 1.1, numbers.
PIECES = [
    b"\0", b"\t", b"\r", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\n---\n", b"'", b'"', b'"\\UFFFFFFFF"', b'"\\ud800"', b'"\\0"',
    b"!!bool x", b"!!python/name:os.system x", b"!!set {a}", b"&a ", b"*a", b"&a [*a]", b"<<: *a", b"? ", b": ", b"- ", b"#",
    b"{", b"}", b"[", b"]", b"[" * 500, b"{a: " * 500, b"|", b">", b"%", b"@", b"on", b"null", b"~", b"true", b"017", b"10:30",
    b"1e999", b".nan", b"9" * 5000, b"-1", b"0", b"{run}", b"{nope}", b"{{", b"x: 1\n" * 50,
]  # fmt: skip
Edit = tuple[int, int, bytes]
edits = st.lists(
    st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 12), st.sampled_from(PIECES) | st.binary(max_size=4)),
    min_size=1, max_size=3,
)  # fmt: skip


def load_or_refuse(file: Path, raw: bytes, *overrides: str) -> None:
    file.write_bytes(raw)
    try:
        load(file, overrides)
    except UsageError as error:
        for line in re.split("\n(?=/)", str(error)):
            assert re.match(rf"{re.escape(str(file))}:[1-9]\d*:[1-9]\d*: \S|--set ", line), line


def test_the_whole_one_loads(tmp_path: Path) -> None:
    """What the others are made from has no error itself."""
    file = tmp_path / "scenario.yaml"
    file.write_bytes(WHOLE)
    assert load(file).scenario == "kill-twice"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=edits)
def test_mutated_scenarios_load_or_are_refused(tmp_path: Path, changes: list[Edit]) -> None:
    """A few bytes replaced anywhere never end in another exception."""
    raw = WHOLE
    for start, length, piece in changes:
        raw = raw[:start] + piece + raw[start + length :]
    load_or_refuse(tmp_path / "scenario.yaml", raw)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.binary(max_size=60))
def test_any_bytes_are_refused_or_loaded(tmp_path: Path, text: bytes) -> None:
    """A file that was never a scenario is refused in the same way."""
    load_or_refuse(tmp_path / "scenario.yaml", text)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("at", [b"7", b"first", b"60s", b"{rank: any}", b"torchrun"])
def test_every_trap_in_every_kind_of_place(tmp_path: Path, at: bytes, piece: bytes) -> None:
    """Each known trap, as a number, an id, a duration, a mapping and within text."""
    load_or_refuse(tmp_path / "scenario.yaml", WHOLE.replace(at, piece, 1))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(key=st.sampled_from(["seed", "job.env.A", "faults.0.with.grace", "faults.9.id", "assert.1.x", "new.key"]) | st.text(max_size=8),
       value=st.text(max_size=8) | st.sampled_from([piece.decode("latin-1") for piece in PIECES]))  # fmt: skip
@example(key="seed", value="\x08")
def test_overrides_are_taken_or_refused(tmp_path: Path, key: str, value: str) -> None:
    """`--set` with anything in it ends in a scenario or an error, too."""
    load_or_refuse(tmp_path / "scenario.yaml", WHOLE, f"{key}={value}")
