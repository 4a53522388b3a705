"""Checkpoints in an S3 store: which states a death can leave, and the store that torchaos gives to the job."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from explorations import outcome_of, saves
from resumes import recorded
from saves import Disk
from waiting import wait_until

from torchaos.harness.crash_explorer import recorded_run, s3_store, state_selection
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.exploration_summary import files_of, script_of
from torchaos.harness.crash_explorer.folder_contents import Blobs, Tree
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording
from torchaos.harness.crash_explorer.recorded_run import Recorded, read
from torchaos.harness.crash_explorer.recording_log import RecordingLog
from torchaos.harness.crash_explorer.resume_runs import checkpoints_in
from torchaos.harness.crash_explorer.s3_store import StoreServer, date_objects, in_folder, is_stored
from torchaos.harness.crash_explorer.state_selection import models_of
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

boto3 = pytest.importorskip("boto3")
errors = pytest.importorskip("botocore.exceptions")
pytestmark = pytest.mark.needs("rclone")

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
    with StoreServer(stored_plan(), run, folder / "store.log", notes) as served:
        yield {name: value.replace("{run}", str(run.job)) for name, value in served.plan.job.env.items()}


def client(env: dict[str, str]) -> Any:
    names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    own = {name: env[value] for name, value in names.items()}
    return boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], region_name=env["AWS_DEFAULT_REGION"], **own)


def recording_of(notes: Path) -> Recording:
    return read(notes, Tree(), [], 0.0, 1e9, stored=True)


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
    found = list(state_selection.process_death_states(CrashPoints(recording, symmetry=False)))
    expected = [{}, a, b, a | b, a | b | one, a | b | two, b | two, two]
    shown = [sorted(contents(recording, state.tree).items()) for state in found]
    assert sorted(shown) == sorted(sorted(each.items()) for each in expected)
    assert {state.tree.folders for state in found} == {frozenset(), frozenset({"step-1"})}
    named = next(state for state in found if state.last_operation and state.last_operation.kind is OperationKind.PUT
                 and state.operations == 3)  # fmt: skip
    assert dict(files_of(named, recording))["newest"] == "complete"


def test_a_missing_object_is_in_the_story(tmp_path: Path) -> None:
    """The name of the newest checkpoint is there, and its part is not: the part is named, although a store has no
    folder that could be missing."""
    disk = Disk(Blobs(tmp_path / "blobs"))
    disk.rank(0).put("newest", b"1")
    disk.rank(0).put("step-1/0", b"a")
    recording = disk.recording()
    (state,) = (
        state for state in state_selection.process_death_states(CrashPoints(recording)) if state.operations == 1
    )
    assert dict(files_of(state, recording)) == {"newest": "complete", "step-1/0": "missing"}


def test_requests_are_recorded(tmp_path: Path) -> None:
    """Two ranks put objects: each complete upload is one operation of its rank, with its bytes. An upload that is never
    completed leaves nothing, and is no operation. A key outside of the checkpoints is no operation either."""
    with store_in(tmp_path, tmp_path / "notes") as env:
        for rank in ("0", "1"):
            identity = {"RANK": rank, "TORCHELASTIC_RUN_ID": "x"}
            subprocess.run([sys.executable, "-c", RANK], env={**os.environ, **env, **identity}, check=True, timeout=300)
        store = client(env)
        store.put_object(Bucket="saved", Key="other/log", Body=b"x")
        store.copy_object(Bucket="saved", Key="run/copy", CopySource="saved/run/step 1/rank-0.pt")
        store.copy_object(Bucket="saved", Key="run/old/copy", CopySource="saved/run/step 1/rank-0.pt")
        # Some clients also remove the folders of the objects, which are none.
        keys = [{"Key": f"run/{name}"} for name in ("large-0", "old/copy", "old", "was-never-there")]
        assert "Errors" not in store.delete_objects(Bucket="saved", Delete={"Objects": keys})
        store.delete_object(Bucket="saved", Key="run/large-1")
        with pytest.raises(store.exceptions.NoSuchKey):
            store.get_object(Bucket="saved", Key="run/never-0")
    recording = recording_of(tmp_path / "notes")
    told = [(operation.rank, operation.kind.value, operation.path) for operation in recording.operations]
    assert told[:4] == [
        (rank, "put", name) for rank in (0, 1) for name in (f"step 1/rank-{rank}.pt", f"large-{rank}")
    ]  # fmt: skip
    assert told[4:6] == [(None, "put", "copy"), (None, "put", "old/copy")]
    assert told[6:] == [(None, "unlink", path) for path in ("large-0", "old/copy", "large-1")]
    assert not [doubt for doubt in recording.unsure if "was put" in doubt]
    large: Operation = recording.operations[1]
    assert large.size == PART + 7
    last = list(state_selection.process_death_states(CrashPoints(recording)))[-1]
    assert set(last.tree.files) == {"copy", "step 1/rank-0.pt", "step 1/rank-1.pt"}
    before = next(
        state for state in state_selection.process_death_states(CrashPoints(recording)) if state.operations == 4
    )
    assert contents(recording, before.tree)["large-1"] == b"\1" * PART + b"\2" * 7


def test_ranks_that_change_the_same_object(tmp_path: Path) -> None:
    """Two ranks put the same object, and later remove it: the order of their requests is tried as it was seen, and the
    recording says so. No rank has done something later while its own earlier request is undone."""
    notes = RecordingLog(tmp_path)
    for rank in (0, 1):
        notes.add(
            OperationKind.PUT,
            "last.pt",
            rank,
            rank + 0.5,
            0,
            os.getpid(),
            size=1,
            blob=notes.blobs.add(b"01"[rank:][:1]),
        )
    notes.close()
    recording = recording_of(tmp_path)
    same = replace(recording.operations[1], rank=1)
    assert read(tmp_path, Tree(), [], 0.0, 9.0, stored=True).unsure == ()  # of one process
    disk = Disk(Blobs(tmp_path / "blobs"))
    disk.rank(0).put("last.pt", b"0")
    disk.rank(1).put("last.pt", b"1")
    disk.rank(0).unlink("last.pt")
    disk.rank(1).unlink("last.pt")
    for rank in (0, 1):
        disk.rank(rank).put(f"done-{rank}", b"")
    found = [
        contents(disk.recording(), state.tree)
        for state in state_selection.process_death_states(CrashPoints(disk.recording()))
    ]
    assert {"last.pt": b"0"} in found
    assert {"last.pt": b"1"} in found
    assert all("last.pt" not in each for each in found if "done-1" in each)
    assert list(recorded_run._shared((recording.operations[0], same))) == [
        "several processes changed the object last.pt: the order of these requests is tried only as it was seen"
    ]


def test_what_the_store_does_not_know(tmp_path: Path) -> None:
    """A request that only a store of a cloud can carry out is refused, and never changes an object's bytes: tags, a
    condition with a tag of contents, a form. A condition that the object is new holds. Compressed bytes stay as they
    are. Metadata are a doubt, because states do not have them."""
    with store_in(tmp_path, tmp_path / "notes") as env:
        store = client(env)
        place = {"Bucket": "saved", "Key": "run/a"}
        store.put_object(**place, Body=b"a", IfNoneMatch="*")
        refused: list[Callable[[], Any]] = [
            lambda: store.put_object(**place, Body=b"b", IfNoneMatch="*"),
            lambda: store.put_object(**place, Body=b"b", IfMatch='"1"'),
            lambda: store.put_object_tagging(**place, Tagging={"TagSet": [{"Key": "k", "Value": "v"}]}),
            lambda: store.get_object_tagging(**place),
        ]
        codes = []
        for ask in refused:
            with pytest.raises(errors.ClientError) as error:
                ask()
            codes.append(error.value.response["Error"]["Code"])
        assert codes == ["PreconditionFailed", "NotImplemented", "NotImplemented", "NotImplemented"]
        assert store.get_object(**place)["Body"].read() == b"a"
        squeezed = gzip.compress(b"z" * 1000)
        store.put_object(Bucket="saved", Key="run/b", Body=squeezed, ContentEncoding="gzip", Metadata={"step": "3"})
        assert store.get_object(Bucket="saved", Key="run/b")["Body"].read() == squeezed
        store.put_object(Bucket="saved", Key="run/folder/", Body=b"")  # some clients mark folders
        store.put_object(Bucket="saved", Key="run/folder/c", Body=b"c")
        store.delete_object(Bucket="saved", Key="run/folder")
        assert store.get_object(Bucket="saved", Key="run/folder/c")["Body"].read() == b"c"
    recording = recording_of(tmp_path / "notes")
    assert [(each.kind, each.path) for each in recording.operations] == [
        (OperationKind.PUT, "a"), (OperationKind.PUT, "b"), (OperationKind.PUT, "folder/c")
    ]  # fmt: skip
    assert len(recording.unsure) == 1
    assert "metadata of their own" in recording.unsure[0]


def test_objects_have_their_times(tmp_path: Path) -> None:
    """A job may take the newest object: the objects of a state are as old as they were in the recorded run."""
    disk = Disk(Blobs(tmp_path / "blobs"))
    for name in ("step-9", "step-10", "empty"):
        disk.rank(0).put(name, name.encode() if name != "empty" else b"")
    disk.rank(0).put("step-9", b"again")
    recording = disk.recording()
    for done, order in ((3, ["step-9", "step-10", "empty"]), (4, ["step-10", "empty", "step-9"])):
        state = next(
            state for state in state_selection.process_death_states(CrashPoints(recording)) if state.operations == done
        )
        root = tmp_path / str(done)
        state.write_to(root)
        date_objects(root, state.tree, recording.operations[:done], recording.began_s, 1000.0)
        assert sorted(os.listdir(root), key=lambda name: (root / name).stat().st_mtime) == order
        assert (root / order[-1]).stat().st_mtime == 1000.0


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
            (server,) = [each for each in psutil.Process().children() if s3_store._SERVER in each.cmdline()]
            (program,) = server.children()
            os.kill(server.pid, signal.SIGKILL)
            program.wait(300)
            wait_until(server.status, psutil.STATUS_ZOMBIE.__eq__, 60)

    with pytest.raises(ChaosError, match=r"the store of the exploration died, with exit code -9"):
        job()


def test_rclone_alone_dies(tmp_path: Path) -> None:
    """rclone is killed between two states. A resume would fail, whatever its state: the store ends too, and the check
    after the resume says so."""
    run = RunDir(tmp_path / "run").create()
    with pytest.raises(ChaosError, match=r"the store .* died, with exit code 1: rclone died with exit code -9"):
        with_dead_rclone(StoreServer(stored_plan(), run, tmp_path / "store.log"))


def with_dead_rclone(served: StoreServer) -> None:
    with served:
        (server,) = [each for each in psutil.Process().children() if s3_store._SERVER in each.cmdline()]
        (program,) = server.children()
        program.kill()
        with suppress(errors.ClientError, errors.BotoCoreError):
            client(dict(served.plan.job.env)).list_objects_v2(Bucket="saved")
        wait_until(server.status, psutil.STATUS_ZOMBIE.__eq__, 60)
        served.check()
        raise AssertionError("nobody has seen it")


def test_without_rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the program rclone, the store says what to install. The last words of a store that does not start are the
    error."""
    monkeypatch.setattr("torchaos.harness.crash_explorer.s3_store.shutil.which", lambda name, path: None)
    with pytest.raises(SystemExit, match=r"rclone is missing: put rclone 1.65 or newer on the PATH"):
        asyncio.run(s3_store.Rclone(tmp_path).renew())
    monkeypatch.setattr(s3_store, "_SERVER", "torchaos.nothing")
    with pytest.raises(ChaosError, match=r"no store can be started: .*No module named torchaos.nothing"):
        store_in(tmp_path).__enter__()


def test_a_job_that_does_not_use_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that keeps its own address of a store puts nothing into ours. Then nothing can be explored, and the error
    says what the job must do. A job that puts an object is recorded."""
    job = Recorded(stored_plan(), tmp_path, lambda text: None)
    job.now.create()
    monkeypatch.setattr(job, "_carry_out", lambda run: None)
    with pytest.raises(ChaosError, match="the recorded run had 0 attempts"):  # it failed, whatever it has put
        job._record(stored_plan(), tmp_path / "recording")
    monkeypatch.setattr(job, "_check", lambda run: None)
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
    outcome = outcome_of(next(state_selection.process_death_states(CrashPoints(saves(tmp_path)))))
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
        ("s3://saved/run", 2, "by a job on this machine alone"),
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_given(place: str, nodes: int, why: str) -> None:
    """Another store than S3, no bucket, and several nodes are refused with the reason."""
    plan = recorded().plan
    job = replace(plan.job, checkpoints=place, nodes=nodes)
    with pytest.raises(UsageError, match=why):
        in_folder(replace(plan, job=job))
    with pytest.raises(UsageError, match=r"s3://BUCKET/KEYS|with launcher: local"):
        in_folder(replace(plan, job=replace(job, nodes=1), launcher="docker"))


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without aiohttp, the error names the extra to install."""
    monkeypatch.setattr(s3_store, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'torchaos\[object-store\]'"):
        stored_plan()
