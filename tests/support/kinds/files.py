"""Kinds of single files, as rows."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from kinds.writers import (
    BAD,
    BLIND,
    DAMAGED,
    GGUF,
    INCOMPLETE,
    INDEX,
    LEVELDB,
    MSGPACK,
    ONNX,
    OPTIMIZER,
    POINTER,
    RNG,
    SAFE,
    SCHEDULER,
    TORCH,
    UNKNOWN,
    UNTOLD,
    WHOLE,
    Buffer,
    Color,
    Row,
    Scaled,
    archive,
    cut,
    emptied,
    exported,
    flip,
    flip_first,
    hdf5,
    joblib,
    longer,
    model,
    newlines,
    packed,
    plain,
    raw,
    safetensors,
    saved,
    script,
    shifted,
    tar,
    tar_of_torch,
    tensors,
    text,
    tfrecord,
    training,
    written,
    zeroed_record,
)

FILES = [
    # torch.save
    Row("a state dict of torch.save", "model.pt", saved(model), WHOLE, TORCH),
    Row("the same by another name", "model", saved(model), WHOLE, {"cut": (cut, BAD), "one bit": (flip, BAD)}),
    Row("a checkpoint of a loop of one's own", "step-40.pt", saved(training), WHOLE, TORCH),
    Row(
        "the form of torch before 1.6",
        "old.pth",
        saved(training, _use_new_zipfile_serialization=False),
        UNTOLD,
        {"cut": (cut, BAD), "the first bit": (flip_first, BAD), "emptied": (emptied, BAD)},
    ),
    Row("as PyTorch's ImageNet example names it", "model_best.pth.tar", saved(training), WHOLE, TORCH),
    Row("an optimizer alone is no checkpoint", "optimizer.pt", OPTIMIZER, UNTOLD, TORCH),
    Row("nor an optimizer of another library", "opt_state.pt", saved(lambda: {"mu": model(), "nu": model()}), UNTOLD),
    Row("a model in a file of that name", "optimizer.pt", saved(lambda: {"model": model()}), WHOLE),
    Row("nor is a schedule", "scheduler.pt", SCHEDULER, UNTOLD, TORCH),
    Row("nor the generators of one rank", "rng_state_0.pth", RNG, UNTOLD, TORCH),
    Row("an empty state dict is no damage", "empty.pt", saved({}), UNTOLD, TORCH),
    Row("training_args.bin, which holds an object", "training_args.bin", saved(Color.RED), UNTOLD, TORCH),
    Row("one of several parts, given alone", "pytorch_model-00001-of-00002.bin", saved(model), UNTOLD, TORCH),
    Row("a file of one rank, given alone", "model_rank_0.pt", saved(training), UNTOLD, TORCH),
    Row(
        "numbers of eight bits",
        "fp8.pt",
        saved(
            lambda: {
                str(kind): torch.ones(90).to(kind)
                for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row(
        "sparse tensors",
        "sparse.pt",
        saved(lambda: {"coo": torch.eye(9).to_sparse(), "csr": torch.eye(9).to_sparse_csr()}),
        WHOLE,
        TORCH,
    ),
    Row(
        "quantized tensors",
        "quantized.pt",
        saved(
            lambda: {
                "q": torch.quantize_per_tensor(torch.ones(90), 0.1, 0, torch.qint8),
                "c": torch.quantize_per_channel(torch.ones(4, 9), torch.ones(4), torch.zeros(4), 0, torch.qint8),
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row(
        "a subclass of a tensor", "subclass.pt", saved(lambda: {"w": torch.ones(90).as_subclass(Scaled)}), WHOLE, TORCH
    ),
    Row(
        "nested tensors",
        "nested.pt",
        saved(lambda: {"n": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])}),
        WHOLE,
        TORCH,
    ),
    Row(
        "a tensor on no device", "meta.pt", saved(lambda: {"m": torch.ones(9, device="meta"), **model()}), WHOLE, TORCH
    ),
    Row(
        "keys that are no text",
        "keys.pt",
        saved(
            lambda: {
                **model(),
                "by": {((1, 2), "a"): 1, Color.RED: 2, None: 3, 1.5: 4, frozenset({1}): 5, torch.float32: 6},
                "counts": Counter({(1, 2): 3}),
                "ordered": OrderedDict({(0, 1): 1}),
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row(
        "numpy's numbers and arrays in it",
        "arrays.pt",
        saved(
            lambda: {
                **model(),
                "a": np.arange(9),
                "s": np.float32(1),
                "rng": np.random.default_rng(1).bit_generator.state,
                "o": np.array([None, "x"], dtype=object),
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row("a module saved whole", "module.pt", saved(lambda: torch.nn.Linear(30, 20)), WHOLE, TORCH),
    Row(
        "as Ultralytics saves",
        "best.pt",
        saved(
            lambda: {
                "epoch": 3,
                "best_fitness": 0.5,
                "model": torch.nn.Linear(30, 20).half(),
                "ema": None,
                "updates": 9,
                "optimizer": training()["optimizer"],
                "train_args": {"imgsz": 640},
                "date": "2024-01-01",
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row(
        "as timm saves",
        "checkpoint-3.pth.tar",
        saved(
            lambda: {
                "epoch": 3,
                "arch": "resnet18",
                "state_dict": model(),
                "optimizer": training()["optimizer"],
                "version": 2,
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row(
        "as Lightning saves",
        "epoch=3-step=40.ckpt",
        saved(
            lambda: {
                "epoch": 3,
                "global_step": 40,
                "pytorch-lightning_version": "2.6",
                "state_dict": model(),
                "loops": {"fit_loop": 1},
                "optimizer_states": [training()["optimizer"]],
                "lr_schedulers": [],
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row(
        "weights of four bits, as bitsandbytes packs them",
        "bnb.pt",
        saved(
            lambda: {
                "w": torch.zeros(300, 1, dtype=torch.uint8),
                "w.absmax": torch.ones(10),
                "w.quant_map": torch.ones(16),
                "w.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8),
            }
        ),
        WHOLE,
        TORCH,
    ),
    # safetensors
    Row("safetensors", "model.safetensors", tensors(), UNTOLD, SAFE),
    Row("by a name that is a digest, as in a cache", "4d7a2146", tensors(), UNTOLD, {"cut": (cut, BAD)}),
    Row("an adapter of PEFT", "adapter_model.safetensors", tensors(), UNTOLD, SAFE),
    Row(
        "types of less than a byte",
        "fp4.safetensors",
        safetensors({"w": ("F4", [64], 32), "s": ("F32", [8], 32)}),
        UNTOLD,
        {"emptied": (emptied, BAD)},
    ),
    Row("no tensors in it", "none.safetensors", safetensors({}), UNTOLD, {"emptied": (emptied, BAD)}),
    Row("a type that is newer than this code", "i4.safetensors", safetensors({"w": ("I4", [64], 32)}), UNTOLD),
    Row(
        "a type that does not fit its bytes",
        "model.safetensors",
        safetensors({"w": ("I4", [64], 64), "s": ("F32", [8], 32)}),
        DAMAGED,
    ),
    Row("safetensors by another format's name", "pytorch_model.bin", tensors(), UNKNOWN),
    Row("torch.save by another format's name", "model.safetensors", saved(model), UNKNOWN),
    # files of other kinds, also under the extensions of torch.save
    Row("TorchScript", "model.pt", script, UNKNOWN, BLIND),
    Row("a program of torch.export", "model.pt2", exported, UNKNOWN, BLIND),
    Row("the same, as .pt", "exported.pt", exported, UNKNOWN, BLIND),
    Row("a plain pickle", "state.pkl", plain({"returns": [1.0, 2.0]}), UNKNOWN, BLIND),
    Row("the same in protocol 2", "state.pt", plain({"returns": [1.0, 2.0]}, 2), UNKNOWN, BLIND),
    Row("the same in protocol 0", "state.bin", plain({"returns": [1.0, 2.0]}, 0), UNKNOWN, BLIND),
    Row("the same in protocol 1", "state.ckpt", plain({"returns": [1.0, 2.0]}, 1), UNKNOWN, BLIND),
    Row("a replay buffer", "replay_buffer.pkl", plain(Buffer), UNKNOWN, BLIND),
    Row("a large plain pickle", "rollouts.pkl", plain({"x": np.zeros(3_000_000)}), UNKNOWN, BLIND),
    Row("a plain pickle by another name", "meta.pickle", plain({"stoi": {"a": 1}}), UNKNOWN, BLIND),
    Row("joblib", "model.pkl", joblib, UNKNOWN, BLIND),
    Row("joblib, compressed", "model.pkl", raw(zlib.compress(bytes(range(250)) * 9)), UNKNOWN, BLIND),
    Row(
        "stable-baselines3",
        "ppo_10_steps.zip",
        archive({"data": b"{}", "policy.pth": bytes(90), "_stable_baselines3_version": b"2.3"}),
        UNKNOWN,
        BLIND,
    ),
    Row("the same, as .pth", "ppo.pth", archive({"data": b"{}", "_stable_baselines3_version": b"2.3"}), UNKNOWN, BLIND),
    Row("numpy.savez", "arrays.npz", lambda path: np.savez(path, a=np.ones(99)), UNKNOWN, BLIND),
    Row("the same, as .bin", "arrays.bin", archive({"a.npy": bytes(90), "b.npy": bytes(90)}), UNKNOWN, BLIND),
    Row(
        "numpy.savez_compressed, as .ckpt",
        "a.ckpt",
        archive({"a.npy": bytes(900)}, zipfile.ZIP_DEFLATED),
        UNKNOWN,
        BLIND,
    ),
    Row("numpy.save", "array.npy", lambda path: np.save(path, np.ones(99)), UNKNOWN, BLIND),
    Row("GGUF", "model.gguf", raw(GGUF + bytes(99)), UNKNOWN, BLIND),
    Row("the same, as .bin", "ggml-model.bin", raw(GGUF + bytes(99)), UNKNOWN, BLIND),
    Row("ONNX", "model.onnx", raw(ONNX), UNKNOWN, BLIND),
    Row("the same, as .pt", "onnx.pt", raw(ONNX), UNKNOWN, BLIND),
    Row("NeMo", "model.nemo", tar({"model_config.yaml": b"a: 1", "model_weights.ckpt": bytes(900)}), UNKNOWN, BLIND),
    Row("NeMo, compressed", "model.nemo", tar({"model_config.yaml": b"a: 1"}, "w:gz"), UNKNOWN, BLIND),
    Row("torch.save before 0.1.10, a tar", "ancient.pth", tar_of_torch, UNKNOWN, BLIND),
    Row("a tar of checkpoints", "checkpoints.tar", tar({"a.pt": bytes(900)}), UNKNOWN, BLIND),
    Row("Keras, HDF5", "model.h5", hdf5, UNKNOWN, BLIND),
    Row("HDF5, as .ckpt", "weights.ckpt", hdf5, UNKNOWN, BLIND),
    Row("Keras 3", "model.keras", archive({"metadata.json": b"{}", "model.weights.h5": bytes(90)}), UNKNOWN, BLIND),
    Row("Flax, msgpack", "flax_model.msgpack", raw(MSGPACK), UNKNOWN, BLIND),
    Row("an index of TensorFlow", "model.ckpt-10.index", raw(LEVELDB), UNKNOWN, BLIND),
    Row("tensors of TensorFlow", "model.ckpt-10.data-00000-of-00001", raw(bytes(range(250))), UNKNOWN, BLIND),
    Row("TensorBoard's events", "events.out.tfevents.17.host", tfrecord, UNKNOWN, BLIND),
    Row(
        "tokens, as nanoGPT reads them", "train.bin", raw(np.arange(1, 999, dtype=np.uint16).tobytes()), UNKNOWN, BLIND
    ),
    Row("tokens that begin with zeros", "val.bin", raw(np.zeros(999, np.uint16).tobytes()), UNKNOWN, BLIND),
    Row("tokens of llm.c", "tokens.bin", raw(struct.pack("<3I", 20240520, 1, 9) + bytes(range(90))), UNKNOWN, BLIND),
    Row(
        "an archive of TorchServe",
        "model.mar",
        archive({"MAR-INF/MANIFEST.json": b"{}", "model.pt": bytes(9)}),
        UNKNOWN,
        BLIND,
    ),
    Row("Parquet, as .bin", "data.bin", raw(b"PAR1" + bytes(range(99)) + b"PAR1"), UNKNOWN, BLIND),
    Row("a page of HTML, which a download left", "model.bin", text("<!DOCTYPE html><html>404</html>"), UNKNOWN, BLIND),
    Row("the same, as safetensors", "page.safetensors", text("<!DOCTYPE html><html>404</html>"), UNKNOWN, BLIND),
    Row(
        "a pointer of Git LFS: the file is not here",
        "pytorch_model.bin",
        text(POINTER),
        INCOMPLETE,
        {"emptied": (emptied, BAD)},
    ),
    Row("the same, as safetensors", "lfs.safetensors", text(POINTER), INCOMPLETE, {"emptied": (emptied, BAD)}),
    Row("README", "README.md", text("# A model\n\nIt was trained.\n"), UNKNOWN, {"emptied": (emptied, (UNKNOWN,))}),
    Row(
        "a tokenizer",
        "tokenizer.json",
        text(json.dumps({"version": "1.0", "model": {"vocab": {"a": 1}}})),
        UNKNOWN,
        BLIND,
    ),
    Row("a log in lines of JSON", "log.jsonl", text('{"step": 1}\n{"step": 2}\n'), UNKNOWN, BLIND),
    Row("an index of shards, given alone", "model.safetensors.index.json", text(INDEX), UNKNOWN, BLIND),
    Row("compressed by gzip", "model.pt.gz", lambda path: path.write_bytes(gzip.compress(bytes(900))), UNKNOWN, BLIND),
    Row("the same, as .pt", "gz.pt", lambda path: path.write_bytes(gzip.compress(bytes(900))), UNKNOWN, BLIND),
    Row("encrypted by openssl", "model.pt", raw(b"Salted__" + bytes(range(99))), UNKNOWN, BLIND),
    Row("random bytes", "model.pth", raw(np.random.default_rng(1).bytes(999)), UNKNOWN, BLIND),
    Row(
        "random bytes under another name", "model.safetensors", raw(np.random.default_rng(1).bytes(999)), UNKNOWN, BLIND
    ),
    Row("a bare tensor, which may be anything", "tensor.pt", saved(lambda: torch.ones(900)), UNTOLD, TORCH),
    Row("a data set", "train_data.pt", saved(lambda: [torch.ones(90, 9), torch.ones(90).long()]), UNTOLD, TORCH),
    Row(
        "objects of the standard library in it",
        "objects.pt",
        saved(
            lambda: {
                **model(),
                "date": datetime(2024, 1, 1),
                "number": Decimal("1.5"),
                "range": range(3),
                "path": Path("/a/b"),
                "half": partial(int, base=2),
            }
        ),
        WHOLE,
        TORCH,
    ),
    Row("bytes after its end", "longer.pt", longer, DAMAGED),
    Row("zeros where a record begins", "zeroed.pt", zeroed_record, DAMAGED),
    Row("bytes before its start", "shifted.pt", shifted, DAMAGED),
    Row("newlines changed on the way, as FTP does", "newlines.pt", newlines, INCOMPLETE),
    Row("packed again by another zip", "packed.pt", packed, UNTOLD, {"cut": (cut, BAD)}),
    Row(
        "a pickle that would run a program",
        "evil.pkl",
        raw(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."),
        DAMAGED,
    ),
    Row("the same in protocol 0", "evil.pt", raw(b"cos\nsystem\n(S'true'\ntR."), DAMAGED),
    Row("what macOS keeps of another file", "._model.pt", raw(b"\x00\x05\x16\x07\x00\x02" + bytes(99)), UNKNOWN, BLIND),
    Row("Paddle", "model.pdparams", plain({"w": np.ones(3)}), UNKNOWN, BLIND),
    Row("fastText", "cc.en.300.bin", raw(struct.pack("<ii", 793712314, 12) + bytes(range(99))), UNKNOWN, BLIND),
    Row("LightGBM, which is text", "model.bin", text("tree\nversion=v3\nnum_class=1\n"), UNKNOWN, BLIND),
    Row("a page of HTML after a blank line", "model.pt", text("\n <!DOCTYPE html><html></html>"), UNKNOWN),
    Row("an object store's answer", "model.bin", text("<Error><Code>NoSuchKey</Code></Error>"), UNKNOWN),
    Row("an empty text", "README.md", raw(b""), UNKNOWN),
    Row("events under another name", "model.safetensors", tfrecord, UNKNOWN),
    Row(
        "stable-baselines3 with little JSON, cut off",
        "rl_model_100_steps.zip",
        lambda path: [put(path) for put in (archive({"data": b"{}", "policy.pth": written(saved(model))}), cut)],
        INCOMPLETE,
    ),
    Row(
        "a model quantized by GPTQ",
        "gptq.safetensors",
        lambda path: save_file({"qweight": torch.zeros(30, 4, dtype=torch.int32), "scales": torch.ones(3, 4)}, path),
        UNTOLD,
        SAFE,
    ),
]
