"""Files from untrusted sources."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder

DATA = Path(__file__).with_name("data")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code(tmp_path: Path, protocol: int) -> None:
    """It is refused by name, and nothing runs; torn, too."""
    raw = pickle.dumps({"entries": [Evil(tmp_path / "ran")]}, protocol)
    (tmp_path / "dump_0").write_bytes(raw)
    (tmp_path / "dump_1").write_bytes(raw[:-3])
    with pytest.raises(UsageError, match="mkdir"):
        read_folder(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_asks_for_the_whole_memory(tmp_path: Path) -> None:
    """A memo index of two billion is a file of ten bytes."""
    (tmp_path / "dump_0").write_bytes(b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b".")
    begun = time.monotonic()
    with pytest.raises(UsageError):
        read_folder(tmp_path)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 100, b"{", b"[" * 100_000, b"{" + b'"a":[' * 50_000, b"\x80\x02]q\x01.", b"hello"]
)
def test_rubbish(tmp_path: Path, raw: bytes) -> None:
    """One clear error, with the file's name."""
    (tmp_path / "dump_7").write_bytes(raw)
    with pytest.raises(UsageError, match="dump_7"):
        read_folder(tmp_path)


def test_damaged_bytes(tmp_path: Path) -> None:
    """Whatever bytes are damaged, reading ends with a diagnosis or a clear error."""
    draw = random.Random(5)
    good = [(DATA / "lock_gil_1st" / f"_dump_{rank}").read_bytes() for rank in (0, 8, 9)]
    for _ in range(60):
        for rank, raw in zip((0, 8, 9), good, strict=True):
            bad = bytearray(raw)
            for _ in range(draw.randint(1, 20)):
                bad[draw.randrange(len(bad))] = draw.randrange(256)
            (tmp_path / f"_dump_{rank}").write_bytes(bad)
        with suppress(UsageError):  # anything else fails the test
            diagnose(read_folder(tmp_path)).to_json()


def test_wrong_types_everywhere(tmp_path: Path) -> None:
    """Well-formed data of the wrong shape."""
    entry = {
        "record_id": "x",
        "process_group": 3,
        "collective_seq_id": [],
        "profiling_name": None,
        "frames": 7,
        "input_sizes": "a",
    }
    for rank, dump in enumerate(
        [{"entries": [entry, 5, None]}, {"entries": 4, "pg_config": [1], "pg_status": {"0": 1}}]
    ):
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(dump))
    diagnose(read_folder(tmp_path)).to_json()


def test_nothing_to_read(tmp_path: Path) -> None:
    """A directory without dumps says how to get them."""
    (tmp_path / "fault_injection.log").write_text("Rank 3")
    with pytest.raises(UsageError, match="TORCH_FR_BUFFER_SIZE"):
        read_folder(tmp_path)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_line_never_breaks(tmp_path: Path, options: list[str]) -> None:
    """`torchaos diagnose` on what is empty, torn, foreign, of wrong types, or no folder: a diagnosis or one clear error
    that names the file or folder, never a traceback."""
    runner, good = CliRunner(), (DATA / "lock_gil_1st" / "_dump_0").read_bytes()
    entry = {"process_group": 3, "collective_seq_id": [], "profiling_name": None, "frames": 7, "retired": "x"}
    odd = {"entries": [entry, 5], "pg_config": {"0": {"ranks": "[0, 1"}}, "pg_status": {"0": [], "x": {"a": 1}}}
    bodies = {
        "empty": b"", "zeros": b"\0" * 99, "half": good[: len(good) // 2], "head": good[:9], "text": b"hello",
        "list": pickle.dumps([1]), "odd": pickle.dumps(odd), "json": b'{"entries": [{"state": 1, "pg_id": {}}]}',
        "huge": json.dumps({"entries": [{"collective_seq_id": 10**40, "record_id": -(10**40)}] * 3}).encode(),
        "nan": b'{"entries": [{"time_created_ns": NaN, "timeout_ms": Infinity, "is_p2p": "no"}], "pg_status": []}',
        "deep": b"[" * 99_999, "evil": pickle.dumps({"entries": [Evil(tmp_path / "ran")]}),
    }  # fmt: skip
    for name, body in bodies.items():
        for beside in (False, True):
            folder = tmp_path / f"{name}-{beside}"
            folder.mkdir()
            (folder / "_dump_1").write_bytes(body)
            if beside:
                (folder / "_dump_0").write_bytes(good)
            done = runner.invoke(cli, ["diagnose", str(folder), *options])
            assert "Traceback" not in done.output, name
            assert isinstance(done.exception, (type(None), SystemExit, ChaosError)), (name, done.exception)
            if beside:
                assert done.exit_code == 0, (name, done.output)
                assert "_dump_1" in done.output or name in ("odd", "json", "huge", "nan"), (name, done.output)
            if options and done.exit_code == 0:
                assert isinstance(json.loads(done.stdout)["culprits"], list)
    for missing in (tmp_path / "nowhere", tmp_path / "half-True" / "_dump_0"):
        assert runner.invoke(cli, ["diagnose", str(missing), *options]).exit_code != 0
    assert not (tmp_path / "ran").exists()
