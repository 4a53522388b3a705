"""Small files of the kinds that people keep beside their checkpoints, or take for checkpoints: written by the library
that owns the kind where it is at hand, and otherwise byte by byte as its specification says."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from torchaos.harness.checkpoints.verify.all_checks import Answer

WHOLE, INCOMPLETE, DAMAGED, UNKNOWN, UNTOLD = Answer
BAD = (INCOMPLETE, DAMAGED)
Write = Callable[[Path], Any]


@dataclass(frozen=True)
class Row:
    """One kind of file or folder. `write` makes it at a path; `path`: its usual name. `damages`: how it is damaged, and
    what may be said of it then."""

    says: str  # one sentence about the kind
    path: str
    write: Write
    answer: Answer
    damages: Mapping[str, tuple[Write, Sequence[Answer]]] = field(default_factory=dict)


def model() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(600.0).reshape(20, 30), "bias": torch.ones(20)}


def training() -> dict[str, Any]:
    """A checkpoint of a training loop in one dict."""
    layer = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(30)).sum().backward()
    optimizer.step()
    return {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "step": 40,
            "scheduler": {"last_epoch": 3}, "rng": torch.get_rng_state()}  # fmt: skip


def saved(what: Any, **how: Any) -> Write:
    return lambda path: torch.save(what() if callable(what) else what, path, **how)


def plain(what: Any, protocol: int = 4) -> Write:
    return lambda path: path.write_bytes(pickle.dumps(what, protocol))


def raw(contents: bytes) -> Write:
    return lambda path: path.write_bytes(contents)


def text(contents: str) -> Write:
    return lambda path: path.write_text(contents)


def archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Write:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as zipped:
            for name, contents in members.items():
                zipped.writestr(name, contents)

    return write


def written(put: Write) -> bytes:
    """What it writes into a file."""
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder, "file"))
        return Path(folder, "file").read_bytes()


def tar(members: Mapping[str, bytes], mode: str = "w") -> Write:
    def write(path: Path) -> None:
        with tarfile.open(path, mode) as packed:  # type: ignore[call-overload]
            for name, contents in members.items():
                about = tarfile.TarInfo(name)
                about.size = len(contents)
                packed.addfile(about, io.BytesIO(contents))

    return write


def tree(members: Mapping[str, Write]) -> Write:
    def write(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, put in members.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            put(path / name)

    return write


def tensors(**more: torch.Tensor) -> Write:
    return lambda path: save_file({**model(), **more}, path)


def longer(path: Path) -> None:
    torch.save(training(), path)
    path.write_bytes(path.read_bytes() + b"more" * 9)


def shifted(path: Path) -> None:
    torch.save(training(), path)
    path.write_bytes(b"junk" * 9 + path.read_bytes())


def zeroed_record(path: Path) -> None:
    """A block of zeros in the middle, over the header of a record."""
    torch.save(model(), path)
    with zipfile.ZipFile(path) as file:
        at = file.infolist()[-1].header_offset
    contents = path.read_bytes()
    path.write_bytes(contents[:at] + bytes(64) + contents[at + 64 :])


def link(target: str) -> Write:
    """A link, also in the place of another."""

    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return write


def newlines(path: Path) -> None:
    torch.save(training(), path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def packed(path: Path) -> None:
    torch.save(training(), path)
    with zipfile.ZipFile(path) as plain_zip:
        members = {name: plain_zip.read(name) for name in plain_zip.namelist()}
    archive(members, zipfile.ZIP_DEFLATED)(path)


# What can happen to a file


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def flip(path: Path) -> None:
    """One bit in the middle, where the contents are."""
    contents = bytearray(path.read_bytes())
    place = len(contents) // 2
    if zipfile.is_zipfile(path):  # not in the padding, which nothing reads
        largest = max(zipfile.ZipFile(path).infolist(), key=lambda one: one.compress_size)
        name, extra = struct.unpack_from("<HH", contents, largest.header_offset + 26)
        place = largest.header_offset + 30 + name + extra + largest.compress_size // 2
    contents[place] ^= 1
    path.write_bytes(contents)


def flip_first(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[0] ^= 1
    path.write_bytes(contents)


def zero_start(path: Path) -> None:
    contents = path.read_bytes()
    path.write_bytes(bytes(min(512, len(contents))) + contents[512:])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def at(name: str, damage: Write) -> Write:
    return lambda path: damage(path / name)


def without(*names: str) -> Write:
    def damage(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return damage


def without_folder(name: str) -> Write:
    return lambda path: shutil.rmtree(path / name)


TORCH = {"cut": (cut, BAD), "one bit": (flip, BAD), "the first bit": (flip_first, BAD), "emptied": (emptied, BAD),
         "zeros at its start": (zero_start, BAD)}  # fmt: skip
BLIND = {"cut": (cut, (UNKNOWN, *BAD)), "one bit": (flip, (UNKNOWN, *BAD)), "emptied": (emptied, BAD)}
SAFE = {"cut": (cut, BAD), "one bit": (flip, (UNTOLD, *BAD)), "emptied": (emptied, BAD)}


class Color(Enum):
    RED = 1


class Buffer:
    """A replay buffer of somebody's own."""

    def __init__(self) -> None:
        self.states, self.pos = np.zeros((50, 4), np.float32), 7


class Scaled(torch.Tensor):
    """A subclass of a tensor."""


def script(path: Path) -> None:
    traced = torch.jit.trace(torch.nn.Linear(30, 20), torch.ones(30))  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(path))


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(30, 20), (torch.ones(30),)), path)


def joblib(path: Path) -> None:
    """As joblib.dump: a pickle that names its own class, and after it the bytes of the array."""
    frame = b"\x80\x04\x95\x30\x00\x00\x00\x00\x00\x00\x00"
    head = frame + b"\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94"
    path.write_bytes(head + np.arange(500.0).tobytes() + b".")


def safetensors(entries: Mapping[str, tuple[str, list[int], int]]) -> Write:
    """A file with these types, shapes and lengths in bytes."""

    def write(path: Path) -> None:
        end, about = 0, {}
        for name, (dtype, shape, length) in entries.items():
            about[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + length]}
            end += length
        head = json.dumps(about).encode()
        path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(end))

    return write


def dcp(path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": model(), "optimizer": {"exp_avg": torch.ones(9)}, "step": 10}, checkpoint_id=path, no_dist=True)


def tar_of_torch(path: Path) -> None:
    """torch.save before 0.1.10."""
    tar({"sys_info": pickle.dumps({}), "pickle": pickle.dumps({}), "storages": b"", "tensors": b""})(path)


def tfrecord(path: Path) -> None:
    event = b"\x09\x00\x00\x00\x80\xd1\x2b\xda\x41\x1a\x0dbrain.Event:2"
    path.write_bytes(struct.pack("<Q", len(event)) + b"abcd" + event + b"abcd")


def hdf5(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(range(256)) * 8)


GGUF = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 6) + b"weight" + struct.pack("<IQIQ", 1, 64, 0, 0)
ONNX = b"\x08\x0a\x12\x07pytorch\x1a\x052.4.0\x3a\x20" + bytes(range(200))
MSGPACK = b"\x81\xa6params\x81\xa6kernel\xc7\x40\x01" + bytes(64)
LEVELDB = bytes(60) + bytes.fromhex("57fb808b247547db")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"
INDEX = json.dumps(
    {"weight_map": {"weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
)
STATE = text('{"global_step": 10, "log_history": []}')
OPTIMIZER = saved(lambda: training()["optimizer"])
RNG = saved(lambda: {"cpu": torch.get_rng_state(), "python": (3, tuple(range(625)), None)})
SCHEDULER = saved({"last_epoch": 10, "_step_count": 11, "base_lrs": [0.1]})
CONFIG = text('{"model_type": "gpt2", "n_layer": 2}')

ZEROS = {"weight": torch.zeros(600), "bias": torch.zeros(20)}
HUGGINGFACE = {"model.safetensors": tensors(), "optimizer.pt": OPTIMIZER, "scheduler.pt": SCHEDULER,
               "rng_state_0.pth": RNG, "rng_state_1.pth": RNG, "training_args.bin": saved({"lr": 0.1}),
               "config.json": CONFIG, "trainer_state.json": STATE}  # fmt: skip
HF_BIN = {**HUGGINGFACE, "pytorch_model.bin": saved(model)}
HF_BIN.pop("model.safetensors")
ACCELERATE = {"pytorch_model.bin": saved(model), "optimizer.bin": OPTIMIZER, "scheduler.bin": SCHEDULER,
              "random_states_0.pkl": RNG, "random_states_1.pkl": RNG, "sampler.bin": SCHEDULER}  # fmt: skip
VERL_ACTOR = {
    f"actor/{part}_world_size_2_rank_{rank}.pt": put for rank in (0, 1)
    for part, put in (("model", saved(model)), ("optim", OPTIMIZER), ("extra_state", RNG))
}  # fmt: skip
VERL = {f"global_step_10/{name}": put for name, put in {**VERL_ACTOR, "data.pt": SCHEDULER}.items()}
VERL["latest_checkpointed_iteration.txt"] = text("10")
AXES = "pp-0-of-1_tp-{}-of-2_exp-0-of-1"
NANOTRON: dict[str, Write] = {
    "10/checkpoint_metadata.json": text('{"version":"1.4","tp":2,"dp":1}'), "10/config.yaml": text("a: 1"),
    "10/model_config.json": CONFIG, "10/lr_scheduler/lr_scheduler.pt": SCHEDULER, "latest.txt": text("10"),
    **{f"10/optimizer/optimizer_{AXES.format(rank)}.pt": OPTIMIZER for rank in (0, 1)},
    **{f"10/random/tp-{rank}-of-2_dp-0-of-1_pp-0-of-1.pt": RNG for rank in (0, 1)},
    **{f"10/model/qkv/model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors": tensors() for rank in (0, 1)},
}  # fmt: skip
DEEPSPEED: dict[str, Write] = {
    "latest": text("global_step10"),
    "global_step10/mp_rank_00_model_states.pt": saved(lambda: {
        "module": model(), "dp_world_size": 2, "ds_config": {"zero_optimization": {"stage": 1}}}),
    **{f"global_step10/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": saved(
        lambda: {"optimizer_state_dict": training()["optimizer"]}) for rank in (0, 1)},
}  # fmt: skip
OF_TWO = saved(lambda: {**training(), "args": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}})
MEGATRON_RANKS: dict[str, Write] = {
    "latest_checkpointed_iteration.txt": text("10"),
    **{f"iter_0000010/mp_rank_{rank:02}/{name}.pt": OF_TWO for rank in (0, 1)
       for name in ("model_optim_rng", "distrib_optim")},
}  # fmt: skip
ORBAX: dict[str, Write] = {
    "10/_CHECKPOINT_METADATA": text('{"init_timestamp_nsecs": 1}'), "10/default/_METADATA": text("{}"),
    "10/default/manifest.ocdbt": raw(b"\x0c\xdb\x3a\x2a" + bytes(range(90))),
    "10/default/d/4f1c": raw(bytes(range(200))), "10/default/_sharding": text("{}"),
}  # fmt: skip
TENSORFLOW: dict[str, Write] = {
    "checkpoint": text('model_checkpoint_path: "model.ckpt-10"\n'), "model.ckpt-10.index": raw(LEVELDB),
    "model.ckpt-10.data-00000-of-00001": raw(bytes(range(200))), "model.ckpt-10.meta": raw(b"\x0a\x05" + bytes(90)),
}  # fmt: skip
DEEPSPEED_3: dict[str, Write] = {
    "latest": text("global_step10"),
    **{f"global_step10/zero_pp_rank_{rank}_mp_rank_00_{part}_states.pt": saved(lambda: {
        "state": training(), "dp_world_size": 2, "ds_config": {"zero_optimization": {"stage": 3}}})
       for rank in (0, 1) for part in ("model", "optim")},
}  # fmt: skip
EXPERTS: dict[str, Write] = {
    "latest": text("global_step10"),
    "global_step10/mp_rank_00_model_states.pt": saved(lambda: {
        "module": model(), "dp_world_size": 1, "num_experts": [3, 2]}),
    **{f"global_step10/layer_{layer}_expert_{number}_mp_rank_00_model_states.pt": saved(model)
       for layer, count in enumerate((3, 2)) for number in range(count)},
    "global_step10/expp_rank_0_mp_rank_00_optim_states.pt": saved(lambda: {"optimizer": training()["optimizer"]}),
}  # fmt: skip
INDEXED: dict[str, Write] = {
    "model.safetensors.index.json": text(INDEX), "config.json": CONFIG,
    "model-00001-of-00002.safetensors": lambda path: save_file({"weight": torch.ones(500)}, path),
    "model-00002-of-00002.safetensors": lambda path: save_file({"b": torch.ones(500)}, path),
}  # fmt: skip


def iteration(*names: str) -> Write:
    """Megatron's folder in the form torch_dist, with these of its files."""

    def write(path: Path) -> None:
        dcp(path / "iter_0000010")
        torch.save({"args": {"seed": 1}, "iteration": 10}, path / "iter_0000010" / "common.pt")
        (path / "iter_0000010" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        for file in (path / "iter_0000010").iterdir():
            if names and file.name not in names:
                file.unlink()

    return write


def nemo(path: Path) -> None:
    """The folder of NeMo 2: weights of Megatron, torch_dist, and a context."""
    dcp(path / "weights")
    torch.save({"args": {"seed": 1}}, path / "weights" / "common.pt")
    tree({"weights/metadata.json": text('{"sharded_backend": "torch_dist"}'), "context/io.json": text("{}")})(path)


def olmo(path: Path) -> None:
    dcp(path / "model_and_optim")
    tree({"train/rank0.pt": RNG, "train/rank1.pt": RNG, "config.yaml": text("a: 1")})(path)
