"""verify, for real checkpoints of every format, for damage with and without a manifest, and for hostile files."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from warm import PARENT

from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.files import locate as files_of
from torchaos.harness.checkpoints.layout import Trouble
from torchaos.harness.checkpoints.verify import Manifests, verify
from torchaos.harness.checkpoints.zip_records import combine, locate
from torchaos.harness.cli import cli
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID

ROOT = Path(__file__).parents[2]
CAMPAIGNS = ROOT / "lab" / "campaigns"
FORMATS = {
    "accelerate/checkpoints/checkpoint_1": "accelerate", "hf_dcp/step-3": "sharded", "hf_dcp/step-4": "dcp_safetensors",
    "lightning/epoch=0-step=2.ckpt": "lightning", "lightning/last.ckpt": "lightning", "nanogpt/ckpt.pt": "torch",
    "sharded/step-1": "sharded", "transformers/checkpoint-2": "huggingface",
}  # fmt: skip


def with_agent(run: Path, script: str, folder: Path | None = None) -> None:
    """Run a script as rank 0 of 1, with the agent in it, in a process that has torch already. Its argument is `folder`,
    or else `run`, the run directory."""
    (run / "events").mkdir(parents=True)
    (run / "script.py").write_text(script)
    AgentPlan("run", str(run / "events"), ("steps", "checkpoints")).write(run / "plan.json")
    mine = {
        "PYTHONPATH": str(ROOT / "harness" / "agent" / "bootstrap"), ENV_PLAN: str(run / "plan.json"),
        ENV_RUN_ID: f"verify-{os.getpid()}", ENV_ATTEMPT_BASE: "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    rank = PARENT.start(run / "script.py", {**os.environ, **mine}, run / "output.txt", [str(folder or run)])
    said, _ = rank.communicate(300)
    assert rank.returncode == 0, said


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which each framework saved checkpoints."""
    for package in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(package)
    run: Path = tmp_path_factory.mktemp("real")
    with_agent(run, (ROOT / "tests" / "trainers" / "save_each.py").read_text(), run / "job")
    return run


def told(run: Path, *names: str) -> dict[str, Any]:
    """What the command line prints of them as JSON, and its exit code."""
    done = CliRunner().invoke(cli, ["verify", "--json", *names])
    return {**json.loads(done.output), "code": done.exit_code}


@pytest.mark.slow
def test_real_checkpoints(real: Path) -> None:
    """Each framework's own checkpoints are found, read and whole, and the manifest covers every tensor in them."""
    found = told(real, "--all", str(real / "job"), "--manifest", str(real))
    by_path = {os.path.relpath(one["path"], real / "job"): one for one in found["checkpoints"]}
    assert {path: by_path[path]["format"] for path in FORMATS} == FORMATS
    assert [
        (one["path"], one["problems"], one["unseen"]) for one in by_path.values() if one["verdict"] != "whole"
    ] == []
    assert found["code"] == 0
    for path in ("transformers/checkpoint-2", "lightning/last.ckpt", "accelerate/checkpoints/checkpoint_1"):
        assert by_path[path]["missing"] == [], path
    assert by_path["transformers/checkpoint-2"]["step"] == 2
    assert by_path["lightning/last.ckpt"]["step"] == 2


@pytest.mark.slow
def test_named_to_the_bit(real: Path, tmp_path: Path, kit: Any) -> None:
    """A flipped bit is named with its tensor and its place: by the manifest, and by a CRC where the format has one."""
    run = tmp_path / "run"
    shutil.copytree(real, run)
    manifests = Manifests.load(run)
    for path in FORMATS:
        layout = kit.layout(run / "job" / path)
        tensor = next(one for one in layout.tensors.values() if one.shards and one.dtype == "float32")
        shard = tensor.shards[0]
        kit.flip(
            Path(shard.extent.file), shard.extent.offset + 5 if shard.extent.length > 5 else shard.extent.offset, 2
        )
        expected = (9 if shard.extent.length > 5 else 1,)
        for known in (manifests, None):
            problem = next((one for one in verify(Local(), layout.path, known).problems if one.bits), None)
            crc = any(checksum.extent.file == shard.extent.file for checksum in layout.checksums)
            if known or crc:
                assert problem is not None, path
                assert (problem.tensor, problem.bits) == (tensor.name, expected)
                assert problem.kind is (Trouble.DIGEST if known else Trouble.CRC)


def test_deepspeed(tmp_path: Path) -> None:
    """A file that DeepSpeed's own sizes call for is missed: the last rank's too, all of them, and the model's."""
    folder = tmp_path / "global_step4"
    folder.mkdir()
    model = {"module": {"w": torch.ones(4)}, "dp_world_size": 2, "ds_config": {"zero_optimization": {"stage": 1}}}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    optimizers = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    for name in optimizers:
        torch.save({"optimizer_state_dict": {"exp_avg": torch.ones(2)}}, folder / name)
    whole = verify(Local(), str(folder))
    assert (whole.layout.format, whole.problems) == ("deepspeed", [])
    for gone in (optimizers[1:], optimizers, ["mp_rank_00_model_states.pt"]):
        copy = tmp_path / f"{len(gone)}-{gone[0]}" / folder.name
        shutil.copytree(folder, copy)
        for name in gone:
            (copy / name).unlink()
        found = verify(Local(), str(copy))
        assert found.layout.format == "deepspeed"
        assert [one.kind for one in found.problems] == [Trouble.TORN] * len(gone), found.problems


def test_manifest_that_has_no_crcs_yet(tmp_path: Path, kit: Any) -> None:
    """A job that was killed soon after a save leaves a manifest without CRCs: damage is found all the same, and the bit
    is named where the format keeps a CRC. A shard of another save is told as that."""
    run = tmp_path / "run"
    script = (
        "import sys, torch\nfrom safetensors.torch import save_file\n"
        "for n in (1, 2):\n"
        "    torch.save({'a': torch.full((500_000,), float(n))}, f'{sys.argv[1]}/step-{n}.pt')\n"
        "    save_file({'a': torch.full((500_000,), float(n))}, f'{sys.argv[1]}/step-{n}.safetensors')"
    )
    with_agent(run, script)
    for path in (run / "agent" / "manifests").glob("*.json"):
        raw = json.loads(path.read_text())
        for one in raw["files"]:
            has_crcs = one.pop("algorithm", None) == "xxh3+crc32"
            assert has_crcs == one["path"].endswith(".safetensors")
            if not has_crcs:
                continue
            one["spans"] = [
                (offset, length, "".join(text[at : at + 16] for at in range(0, len(text), 24)))
                for offset, length, text in one["spans"]
            ]
        path.write_text(json.dumps(raw))
    manifests = Manifests.load(run)
    for name, bit in (("step-2.pt", True), ("step-2.safetensors", False)):
        path = run / name
        assert verify(Local(), str(path), manifests).code == 0
        kit.flip(path, 1_500_000, 4)
        (problem,) = verify(Local(), str(path), manifests).problems
        assert (problem.kind, bool(problem.bits)) == (Trouble.DIGEST, bit)
        shutil.copyfile(run / name.replace("2", "1"), path)
        (problem, *_) = verify(Local(), str(path), manifests).problems
        assert problem.kind is Trouble.STALE, problem


def test_a_save_that_races_with_training(tmp_path: Path, kit: Any) -> None:
    """Memory changes after its digest was taken and before it is in the file: told as that. Damage that comes later is
    damage."""
    run = tmp_path / "run"
    script = (
        "import sys, torch\nfrom safetensors.torch import save_file\n"
        "weight, train = torch.ones(1_000), torch.utils.data.Dataset\n"
        "class Late(dict):\n"
        "    pass\n"
        "save = torch._C.PyTorchFileWriter.write_record\n"
        "class Writer(torch._C.PyTorchFileWriter):\n"
        "    def write_record(self, name, data, size):\n"
        "        if '/data/' in '/' + name and RACE: weight.add_(1)\n"
        "        save(self, name, data, size)\n"
        "torch._C.PyTorchFileWriter = Writer\n"
        "for RACE in (False, True): torch.save({'w': weight}, f'{sys.argv[1]}/{RACE}.pt')"
    )
    with_agent(run, script)
    manifests = Manifests.load(run)
    (problem,) = verify(Local(), str(run / "True.pt"), manifests).problems
    assert (problem.kind, problem.tensor) == (Trouble.RACED, "w"), problem
    assert verify(Local(), str(run / "False.pt"), manifests).code == 0
    kit.flip(run / "False.pt", 1_500, 4)
    (problem,) = verify(Local(), str(run / "False.pt"), manifests).problems
    assert problem.kind is Trouble.DIGEST


def test_without_the_agents_hash(tmp_path: Path) -> None:
    """Where the job's Python has no xxhash, manifests hold CRCs, and a flipped bit is found and named all the same."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "xxhash.py").write_text("raise ImportError")
    with_agent(run, "import sys, torch; torch.save({'a': torch.zeros(500_000)}, f'{sys.argv[1]}/a.pt')")
    (manifest,) = (run / "agent" / "manifests").glob("*.json")
    assert json.loads(manifest.read_text())["algorithm"] == "crc32"
    assert verify(Local(), str(run / "a.pt"), Manifests.load(run)).code == 0
    with open(run / "a.pt", "r+b") as file:
        file.seek(1_500_000)
        file.write(b"\x10")
    (problem,) = verify(Local(), str(run / "a.pt"), Manifests.load(run)).problems
    assert problem.kind is Trouble.DIGEST
    assert problem.bits is not None


def test_a_copy_of_one_of_several_saves_to_one_path(tmp_path: Path) -> None:
    """All were saved as tmp/model.pt, so the path of a copy does not say of which save it is; its headers do. A copy
    of an older save is whole; a flipped bit in it is found."""
    run = tmp_path / "run"
    script = (
        "import os, sys, torch\n"
        "for n in (1, 2, 3):\n"
        "    os.makedirs(f'{sys.argv[1]}/tmp')\n"
        "    torch.save({'a': torch.full((300_000,), float(n)), 'step': n}, f'{sys.argv[1]}/tmp/model.pt')\n"
        "    os.rename(f'{sys.argv[1]}/tmp', f'{sys.argv[1]}/step-{n}')\n"
    )
    with_agent(run, script)
    manifests = Manifests.load(run)
    for number in (1, 2):
        aside = Path(shutil.copytree(run / f"step-{number}", run / f"old-{number}")) / "model.pt"
        found = verify(Local(), str(aside), manifests)
        assert (found.problems, found.manifest) == ([], True)
        with open(aside, "r+b") as file:
            file.seek(9_000)
            file.write(b"\x11")
        problems = verify(Local(), str(aside), manifests).problems
        assert Trouble.DIGEST in [problem.kind for problem in problems]


def test_stale_shard_and_missing_file(tmp_path: Path) -> None:
    """A shard of an older save is told as that, and a file that was saved and is gone is told as missing."""
    run = tmp_path / "run"
    script = (
        "import sys, torch, warnings; warnings.simplefilter('ignore')\n"
        "from torch.distributed.checkpoint.state_dict_saver import save\n"
        "for n in (1, 2):\n"
        "    save({'a': torch.full((300_000,), float(n))}, checkpoint_id=f'{sys.argv[1]}/step-{n}', no_dist=True)"
    )
    with_agent(run, script)
    shutil.copyfile(run / "step-1" / "__0_0.distcp", run / "step-2" / "__0_0.distcp")
    manifests = Manifests.load(run)
    assert verify(Local(), str(run / "step-2")).code == 0, "without a manifest it is not seen"
    (problem,) = verify(Local(), str(run / "step-2"), manifests).problems
    assert problem.kind is Trouble.STALE
    assert str(run / "step-1") in problem.text
    (run / "step-2" / "__0_0.distcp").unlink()
    assert any("though it was saved" in one.text for one in verify(Local(), str(run / "step-2"), manifests).problems)


def test_cannot_be_told(tmp_path: Path, kit: Any) -> None:
    """A safetensors file has no CRC: without a manifest it is said that nothing can tell, and the exit code is 2."""
    kit.safetensors(tmp_path / "m.safetensors", {"w": ("F32", [500], bytes(2000))})
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert "can't be told" in done.output
    assert "no manifest shows which bytes were written" in done.output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nan(tmp_path: Path, kit: Any) -> None:
    """NaN is found in each type and at odd places in a file, and infinity, which masks hold, is no NaN."""
    draw = random.Random(1)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    state = {str(kind): torch.zeros(400_001).to(kind) for kind in kinds} | {"mask": torch.full((9,), -torch.inf)}
    kit.dcp(tmp_path / "step-1", state)
    assert kit.only(tmp_path)["problem"] is None
    places = {}
    for kind in kinds:
        places[str(kind)] = draw.randrange(400_001)
        changed = state[str(kind)].float()
        changed[places[str(kind)]] = torch.nan
        state[str(kind)] = changed.to(kind)
    kit.dcp(tmp_path / "step-1", state)
    found = verify(Local(), str(tmp_path / "step-1"))
    elements = {one.tensor: one.element for one in found.problems if one.kind is Trouble.NAN}
    assert elements == {name: (place,) for name, place in places.items()}


def test_trackers(tmp_path: Path, kit: Any) -> None:
    """A tracker file that names a checkpoint that is not there, or none, is damage; newest is by step, not by name."""
    for step in (9, 10):
        torch.save({"a": torch.ones(3), "step": step}, tmp_path / f"ckpt-{step}.pt")
    kit.flip(tmp_path / "ckpt-9.pt", (tmp_path / "ckpt-9.pt").stat().st_size // 2)
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert (done.exit_code, "ckpt-10.pt" in done.output) == (0, True), done.output
    (tmp_path / "latest").write_text("global_step7")
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert done.exit_code == 1
    assert "names 'global_step7', which does not exist" in done.output


@pytest.mark.parametrize(("name", "text"), [
    ("last_checkpoint", "step-3.pt"), ("last_checkpoint", "/moved/away/step-3.pt"), ("LATEST", "step-3.pt"),
    ("latest.json", '{"checkpoint": "step-3.pt", "step": 3}'), ("latest_checkpoint.txt", "./step-3.pt\n"),
])  # fmt: skip
def test_trackers_of_any_job(name: str, text: str, tmp_path: Path) -> None:
    """A pointer in text or JSON to a file that is gone is told; one to a file that is there is not, and neither is a
    file with such a name that names nothing of this kind."""
    torch.save({"a": torch.ones(3), "step": 2}, tmp_path / "step-2.pt")
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert (done.exit_code, f"{name}: it names 'step-3.pt', which does not exist" in done.output) == (1, True)
    (tmp_path / "out-2.log").write_text("step 2")
    for other in (text.replace("3", "2"), "v1.2, released on Monday", '{"loss": 1}', "{", "", "./logs/out-3.log"):
        (tmp_path / name).write_text(other)
        done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
        assert done.exit_code == 0, (other, done.output)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    """`latest` as a link whose target is gone."""
    torch.save({"a": torch.ones(3), "step": 2}, tmp_path / "step-2.pt")
    (tmp_path / "latest").symlink_to("step-3.pt")
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert (done.exit_code, "latest: it names 'step-3.pt', which does not exist" in done.output) == (1, True)


def test_a_damaged_file_of_unknown_step_may_be_the_newest(tmp_path: Path) -> None:
    """It is checked beside the newest of those whose step is known: `last.pt` that is cut off is no detail."""
    for name, step in (("step-1.pt", 1), ("step-2.pt", 2), ("last.pt", 3)):
        torch.save({"a": torch.ones(3000), "step": step}, tmp_path / name)
    os.truncate(tmp_path / "last.pt", 5000)
    done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert done.exit_code == 1
    assert [line.split(" (")[0] for line in done.output.splitlines() if not line.startswith(" ")] == [
        f"whole: {tmp_path}/step-2.pt", f"incomplete: {tmp_path}/last.pt",
    ]  # fmt: skip


def test_a_name_that_says_another_step_than_the_contents(tmp_path: Path) -> None:
    """Both are told; one more or less is no contradiction, because some count from 0."""
    for step, says in ((15, True), (19, False), (20, False)):
        torch.save({"a": torch.ones(3), "step": step}, tmp_path / "step-20.pt")
        done = CliRunner().invoke(cli, ["verify", str(tmp_path)])
        assert ("its name says step 20, and its contents say step 15" in done.output) == says, done.output


def test_fsspec(tmp_path: Path, kit: Any) -> None:
    """A URL of fsspec is verified where it is."""
    fsspec = pytest.importorskip("fsspec")
    torch.save({"a": torch.zeros(500_000)}, tmp_path / "step-1.pt")
    fs = fsspec.filesystem("memory")
    fs.pipe("/bucket/step-1.pt", (tmp_path / "step-1.pt").read_bytes())
    files, root = files_of("memory://bucket")
    (path,) = formats.find(files, root)
    assert verify(files, path).code == 0
    kit.flip(tmp_path / "step-1.pt", 1_000_000)
    fs.pipe("/bucket/step-1.pt", (tmp_path / "step-1.pt").read_bytes())
    (problem,) = verify(*files_of("memory://bucket/step-1.pt")).problems
    assert problem.kind is Trouble.CRC


def test_object_store(tmp_path: Path, kit: Any) -> None:
    """A checkpoint in an S3 bucket is verified where it is, from the command line."""
    pytest.importorskip("s3fs")
    rclone = shutil.which("rclone", path=os.path.dirname(sys.executable)) or pytest.skip("rclone is not installed")
    (tmp_path / "bucket").mkdir()
    torch.save({"a": torch.zeros(500_000)}, tmp_path / "bucket" / "step-1.pt")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    key, secret = "KEY8CHARS", "SECRET8CHARS"
    command = [rclone, "serve", "s3", "--auth-key", f"{key},{secret}", "--addr", address, str(tmp_path)]
    mine = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": f"http://{address}"}
    verify_it = [sys.executable, "-m", "torchaos.harness", "verify", "s3://bucket"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            _until_it_listens(address, server)
            codes = []
            for _ in range(2):
                done = subprocess.run(
                    verify_it, env={**os.environ, **mine}, capture_output=True, text=True, timeout=120
                )
                codes.append(done.returncode)
                kit.flip(tmp_path / "bucket" / "step-1.pt", 1_000_000)
            assert codes == [0, 1], done.stdout + done.stderr
            assert "the CRC differs" in done.stdout
        finally:
            server.kill()


def _until_it_listens(address: str, server: subprocess.Popen[bytes]) -> None:
    host, port = address.split(":")
    for _ in range(600):
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError as error:
            last = error
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)
    raise AssertionError(f"it does not listen: {last}")


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "corpus").iterdir()), ids=lambda path: path.stem)
def test_mutated_files(file: Path) -> None:
    """A mutated file that verify once raised on is said to be damaged."""
    done = CliRunner().invoke(cli, ["verify", str(file)])
    assert (done.exit_code, done.exception and type(done.exception)) == (1, SystemExit), done.output


def test_crc() -> None:
    """Two CRCs are joined, and a flipped bit is found from the difference of two, at any length."""
    draw = random.Random(2)
    for length in (1, 2, 15, 4096, 1 << 20):
        data = draw.randbytes(length)
        for _ in range(20):
            byte, bit, cut = draw.randrange(length), draw.randrange(8), draw.randrange(length)
            other = bytearray(data)
            other[byte] ^= 1 << bit
            assert locate(zlib.crc32(data) ^ zlib.crc32(other), length) == (byte, bit)
            assert combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), length - cut) == zlib.crc32(data)
    assert locate(0, 100) is None


def test_crc_without_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    """isal only makes it faster: where it is not installed, zlib computes the same."""
    from torchaos.harness.checkpoints import zip_records

    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    spec = importlib.util.spec_from_file_location(f"{zip_records.__name__}_again", zip_records.__file__)
    assert spec
    assert spec.loader
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert again.crc32 is zlib.crc32
    assert again.crc32(b"torchaos") == zip_records.crc32(b"torchaos")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("campaign", "options", "says"),
    [
        ("damage_checkpoints.py", ["--damages", "25", "--intact", "15"], "\n0 damages were not found"),
        ("fuzz_checkpoints.py", ["--files", "250"], "; 0 wrong"),
    ],
)
def test_campaigns(campaign: str, options: list[str], says: str) -> None:
    """A small sample of the campaigns: all damage is found with a manifest, no alarm, no crash, no code run."""
    done = subprocess.run(
        [sys.executable, str(CAMPAIGNS / campaign), *options], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout


def test_a_newer_save_that_never_got_the_name(tmp_path: Path) -> None:
    """A folder can't be renamed onto an earlier save of the same step: the earlier save is whole, and is compared with
    what was in memory when it was made. A file of the newer save in it is found, and so is a flipped bit."""
    run, folder = tmp_path / "run", tmp_path / "run" / "step-1"
    script = (
        "import os, sys, torch\n"
        "here = f'{sys.argv[1]}/step-1'\n"
        "for value in (1., 2.):\n"
        "    os.mkdir(f'{here}.tmp')\n"
        "    for rank in (0, 1): torch.save({'a': torch.full((9_000,), value)}, f'{here}.tmp/rank-{rank}.pt')\n"
        "    try: os.rename(f'{here}.tmp', here)\n"
        "    except OSError: print('not empty')\n"
    )
    with_agent(run, script)
    manifests = Manifests.load(run)
    first, second = (verify(Local(), str(whole), manifests) for whole in (folder, run / "step-1.tmp"))
    assert (first.problems, first.manifest) == ([], True)
    assert [problem.kind for problem in second.problems] == [Trouble.UNFINISHED]
    mixed = shutil.copytree(run, tmp_path / "copy")  # the manifests know the inodes of the original
    with open(folder / "rank-0.pt", "r+b") as file:
        file.seek(9_000)
        file.write(b"\x10")
    (problem,) = verify(Local(), str(folder), manifests).problems
    assert problem.kind is Trouble.DIGEST
    shutil.copyfile(mixed / "step-1" / "rank-0.pt", folder / "rank-0.pt")  # whole again, in the same inode
    assert verify(Local(), str(folder), manifests).problems == []
    (run / "step-1.tmp" / "rank-1.pt").rename(folder / "rank-1.pt")
    (problem, *_) = verify(Local(), str(folder), manifests).problems
    assert (problem.kind, Path(problem.file or "").name) == (Trouble.STALE, "rank-0.pt")
    (folder / "rank-1.pt").unlink()
    (problem,) = verify(Local(), str(folder), manifests).problems
    assert problem.text == "rank-1.pt: missing, though it was saved"


def test_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    """Whole checkpoints beside archives that nobody looked into are not all checkpoints of the folder."""
    (tmp_path / "fast").mkdir()
    (tmp_path / "shared").mkdir()
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {}, "step": 5}, tmp_path / "fast" / "5.pt")
    alone = CliRunner().invoke(cli, ["verify", "--all", str(tmp_path)])
    assert (alone.exit_code, "not read" in alone.stdout) == (0, False), alone.output
    for step in (4, 5):
        (tmp_path / "shared" / f"ckpt-{step}.tar").write_bytes(b"torn")
    every = CliRunner().invoke(cli, ["verify", "--all", str(tmp_path)])
    assert (every.exit_code, "not read: 2 files of the type .tar" in every.stdout) == (2, True), every.output
    newest = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert (newest.exit_code, "not read: 2 files" in newest.stdout) == (0, True), newest.output
    document = json.loads(CliRunner().invoke(cli, ["verify", "--all", "--json", str(tmp_path)]).stdout)
    assert document["unread"] == {".tar": 2}


def test_all_checkpoints_of_unknown_step_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """`model-10.pt` comes after `model-9.pt`, though it is before it in the order of texts."""
    for name in ("model-9.pt", "model-10.pt", "model-8.pt"):
        torch.save({"x": torch.arange(9.0)}, tmp_path / name)
    done = CliRunner().invoke(cli, ["verify", "--all", str(tmp_path)])
    names = re.findall(r"model-\d+", done.stdout)
    assert list(dict.fromkeys(names)) == ["model-8", "model-9", "model-10"]


def test_all_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """`--all` tells step 5 before step 25, and of a file that ends too early that its end is missing."""
    for step in (5, 10, 25):
        torch.save({"weight": torch.zeros(1000)}, tmp_path / f"step_{step}.pt")
    os.truncate(tmp_path / "step_25.pt", 3000)
    done = CliRunner().invoke(cli, ["verify", "--all", str(tmp_path)])
    names = [line.split(" (")[0].rpartition("/")[2] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names == ["step_5.pt", "step_10.pt", "step_25.pt"]
    assert "torn: step_25.pt: not a complete torch.save file: its end is missing, after 3000 bytes" in done.stdout


@pytest.mark.parametrize(("beside", "code"), [("ckpt-4.tar", 0), ("ckpt-5.tar", 0), ("ckpt-6.tar", 2), ("last.tar", 2)])
def test_a_file_that_is_not_read_may_be_the_newest_checkpoint(tmp_path: Path, beside: str, code: int) -> None:
    """Without --all, the answer is about the newest checkpoint: a file that nobody looked into may be that one, unless
    its name says that it is not newer."""
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {}, "step": 5}, tmp_path / "ckpt-5.pt")
    (tmp_path / beside).write_bytes(b"torn")
    newest = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert (newest.exit_code, "not read: 1 file of the type .tar" in newest.stdout) == (code, True), newest.output
