"""Kinds of folders, as rows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kinds.writers import (
    BAD,
    CONFIG,
    DAMAGED,
    HF_BIN,
    INCOMPLETE,
    INDEXED,
    OPTIMIZER,
    RNG,
    UNKNOWN,
    UNTOLD,
    WHOLE,
    Buffer,
    Row,
    at,
    cut,
    emptied,
    link,
    model,
    plain,
    raw,
    saved,
    tensors,
    text,
    training,
    tree,
    without,
)


def _with_pipe(path: Path) -> None:
    tree({"state.pt": saved(training)})(path)
    os.mkfifo(path / "orders.pt")


PLACES = [
    Row(
        "a .metadata of something else",
        "data",
        tree({".metadata": text('{"created": 1}'), "a.txt": text("x")}),
        UNKNOWN,
    ),
    Row("a replay buffer in it", "checkpoint-10", tree({**HF_BIN, "replay.pkl": plain(Buffer)}), UNKNOWN),
    Row(
        "JSON that is a list, and lines of JSON, in it",
        "checkpoint-10",
        tree({**HF_BIN, "special_tokens.json": text('["<a>"]'), "log.json": text('{"a": 1}\n{"a": 2}\n')}),
        WHOLE,
    ),
    Row(
        "an index of something else in it",
        "checkpoint-10",
        tree({**HF_BIN, "docs.index.json": text('{"a": 1}')}),
        WHOLE,
    ),
    Row(
        "a sharded model",
        "model",
        tree(INDEXED),
        UNTOLD,
        {
            "a shard is missing": (without("model-00002-of-00002.safetensors"), BAD),
            "all are": (without("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), BAD),
            "a cut shard": (at("model-00001-of-00002.safetensors", cut), BAD),
            "a cut index": (at("model.safetensors.index.json", cut), BAD),
        },
    ),
    Row(
        "a folder of a layout of one's own",
        "step-10",
        tree({"model.pt": saved(model), "optim.pt": OPTIMIZER}),
        UNTOLD,
        {"a file is missing": (without("optim.pt"), (UNTOLD, *BAD)), "a cut file": (at("optim.pt", cut), BAD)},
    ),
    Row(
        "such a folder with all in one file",
        "step-10",
        tree({"state.pt": saved(training)}),
        WHOLE,
        {"a cut file": (at("state.pt", cut), BAD), "emptied": (at("state.pt", emptied), BAD)},
    ),
    Row(
        "a file for each rank",
        "step-10",
        tree({f"rank{rank}.pt": saved(training) for rank in (0, 1)}),
        UNTOLD,
        {"a rank is missing": (without("rank1.pt"), (UNTOLD,))},
    ),
    Row(
        "parts in folders, of an unknown layout",
        "out",
        tree({"10/weights/w0.pt": saved(model), "10/weights/w1.pt": saved(model), "10/gen/g0.pt": RNG}),
        UNTOLD,
        {
            "weights are missing": (without("10/weights/w0.pt", "10/weights/w1.pt"), (UNTOLD,)),
            "one is cut": (at("10/weights/w0.pt", cut), BAD),
        },
    ),
    Row(
        "checkpoints of several steps",
        "out",
        tree({f"step-{step}.pt": saved(training) for step in (9, 10)}),
        WHOLE,
        {"the newest is cut": (at("step-10.pt", cut), BAD)},
    ),
    Row(
        "a replay buffer beside checkpoints",
        "out",
        tree({"step-9.pt": saved(training), "replay.pkl": plain(Buffer)}),
        WHOLE,
    ),
    Row(
        "a replay buffer beside a file without a step",
        "out",
        tree({"a.pt": saved(model), "replay.pkl": plain(Buffer)}),
        WHOLE,
    ),
    Row(
        "files of ranks without a suffix",
        "step-10",
        tree({f"state.{rank}": saved(training) for rank in (0, 1)}),
        UNTOLD,
        {"a part is cut": (at("state.1", cut), BAD)},
    ),
    Row(
        "NeMo 1",
        "checkpoints",
        tree({f"mp_rank_0{rank}/gpt-step=10.ckpt": saved(training) for rank in (0, 1)}),
        UNTOLD,
        {"a part is cut": (at("mp_rank_01/gpt-step=10.ckpt", cut), BAD)},
    ),
    Row(
        "the last one, and those of steps",
        "out",
        tree({name: saved(training) for name in ("checkpoint-3.pth.tar", "last.pth.tar", "model_best.pth.tar")}),
        WHOLE,
        {"the last is cut": (at("last.pth.tar", cut), BAD)},
    ),
    Row("plain pickles only", "out", tree({f"state_{n}.pkl": plain({"a": [1]}, n) for n in (2, 4, 5)}), UNKNOWN),
    Row(
        "wandb's folder",
        "wandb",
        tree({"run-1/files/config.yaml": text("a: 1"), "run-1/run.wandb": raw(b"\x8d\xfa")}),
        UNKNOWN,
    ),
    Row(
        "a tokenizer's folder", "tokenizer", tree({"tokenizer.json": text("{}"), "vocab.txt": text("a\nb\n")}), UNKNOWN
    ),
    Row(
        "an adapter's folder",
        "adapter",
        tree({"adapter_model.safetensors": tensors(), "adapter_config.json": text('{"r": 8}'), "README.md": text("x")}),
        UNTOLD,
    ),
    Row("a folder with only a config", "checkpoint-10", tree({"config.json": CONFIG}), UNTOLD),
    Row("an empty folder with a step in its name", "out/step-10", lambda path: path.mkdir(parents=True), INCOMPLETE),
    Row("an unfinished save by its name", "step-10.tmp", tree({"state.pt": saved(training)}), INCOMPLETE),
    Row(
        "a folder of an archive of another kind",
        "step-10",
        tree({"state.pt": saved(training), "arrays.npz": lambda path: np.savez(path, a=np.ones(9))}),
        UNTOLD,
    ),
    Row(
        "JSON with comments in it",
        "checkpoint-10",
        tree({**HF_BIN, "ds_config.json": text('{\n  // ZeRO\n  "stage": 1,\n}')}),
        WHOLE,
        {"cut": (at("ds_config.json", cut), BAD)},
    ),
    Row(
        "JSON with a byte order mark in it", "checkpoint-10", tree({**HF_BIN, "a.json": raw(b"\xef\xbb\xbf{}")}), WHOLE
    ),
    Row(
        "what macOS keeps of another file, beside it",
        "step-10",
        tree({"state.pt": saved(training), "._state.pt": raw(b"\x00\x05\x16\x07" + bytes(99))}),
        WHOLE,
    ),
    Row(
        "a latest.txt that holds a date",
        "out",
        tree({"step-10.pt": saved(training), "latest.txt": text("2024-01-01")}),
        WHOLE,
    ),
    Row(
        "a latest.txt that holds an epoch",
        "out",
        tree({"model_epoch20.pt": saved(training), "latest.txt": text("20")}),
        WHOLE,
    ),
    Row(
        "a link to the newest",
        "out",
        tree({"step-10.pt": saved(training), "latest-rank0.pt": link("step-10.pt")}),
        WHOLE,
        {
            "what it names is gone": (at("latest-rank0.pt", link("step-20.pt")), (DAMAGED,)),
            "it names itself": (at("latest-rank0.pt", link("latest-rank0.pt")), (DAMAGED,)),
            "a loop of two beside it": (
                lambda path: [link("b.pt")(path / "a.pt"), link("a.pt")(path / "b.pt")],
                (WHOLE,),
            ),
        },
    ),
    Row(
        "a latest that leaves the extension out",
        "out",
        tree({"step-10.pt": saved(training), "latest": text("step-10\n")}),
        WHOLE,
    ),
    Row(
        "a latest that holds a path elsewhere",
        "out",
        tree({"step-10.pt": saved(training), "latest": text("/data/runs/step-10.pt")}),
        WHOLE,
    ),
    Row(
        "a latest of nested JSON",
        "out",
        tree({"step-10.pt": saved(training), "latest.json": text('{"checkpoints": [{"path": "a/step-10.pt"}]}')}),
        WHOLE,
        {"it names another": (at("latest.json", text('{"checkpoint": {"path": "step-20.pt", "n": [1]}}')), BAD)},
    ),
    Row(
        "shards without an index",
        "model",
        tree({name: put for name, put in INDEXED.items() if not name.endswith("index.json")}),
        UNTOLD,
        {
            "the first is missing": (without("model-00001-of-00002.safetensors"), BAD),
            "the last is missing": (without("model-00002-of-00002.safetensors"), BAD),
        },
    ),
    Row(
        "as many shards as six digits count",
        "model",
        tree({f"model-{n:05}-of-000003.safetensors": tensors() for n in (1, 2, 3)}),
        UNTOLD,
        {"one is missing": (without("model-00002-of-000003.safetensors"), BAD)},
    ),
    Row(
        "Llama's parts of a model",
        "model",
        tree({f"consolidated.{n:02}.pth": saved(training) for n in (0, 1)}),
        UNTOLD,
        {"the first is missing": (without("consolidated.00.pth"), (UNTOLD,))},
    ),
    Row("a part of Llama's that may be all", "consolidated.00.pth", saved(training), WHOLE),
    Row(
        "a pipe in it",
        "step-10",
        _with_pipe,
        UNKNOWN,
    ),
    Row("a folder with a temporary name of its own", "tmp_runs", tree({"a.txt": text("x")}), UNKNOWN),
    Row(
        "marks of other programs in it",
        "step-10",
        tree({"state.pt": saved(training), "_SUCCESS": raw(b""), ".done": raw(b"")}),
        WHOLE,
    ),
    Row(
        "parts that are folders of a known format",
        "out",
        tree({f"{name}/{file}": put for name in ("text", "vision") for file, put in INDEXED.items()}),
        UNTOLD,
        {"a shard is missing": (without("text/model-00001-of-00002.safetensors"), BAD)},
    ),
]
