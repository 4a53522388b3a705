"""Saves and loads a small checkpoint of each format, with the library of that format.

python damage_formats.py save FORMAT ROOT: saves two checkpoints, of steps 10 and 20, and the files beside them.
python damage_formats.py load FORMAT ROOT: for each line on standard input, loads the newest checkpoint, and prints the
result as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

STEPS = (10, 20)


class Format(NamedTuple):
    label: str
    loader: str  # the loading function, in words
    save: Callable[[Path, int], None]
    load: Callable[[Path], Any]


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(96, 64, generator=generator), "bias": torch.randn(96, generator=generator)},
        "optimizer": {name: torch.randn(96, 64, generator=generator) for name in ("exp_avg", "exp_avg_sq")},
        "half": torch.randn(4096, generator=generator).bfloat16(),
        "step": step,
    }


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: zeros_like(value) for name, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else 0


def save_dcp(root: Path, step: int) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = root / f"step-{step}"
    save(state_of(step), storage_writer=FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)


def load_dcp(root: Path) -> Any:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = zeros_like(state_of(0))
    load(state, checkpoint_id=root / "step-20", no_dist=True)
    return state


def save_dcp_safetensors(root: Path, step: int) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(flat(state_of(step)), storage_writer=HuggingFaceStorageWriter(str(root / f"step-{step}")), no_dist=True)


def load_dcp_safetensors(root: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = zeros_like(flat(state_of(0)))
    load(state, storage_reader=HuggingFaceStorageReader(str(root / "step-20")), no_dist=True)
    return state


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors alone, by name, without nesting."""
    found = {}
    for name, value in state.items():
        inner = value if isinstance(value, dict) else {"": value}
        found.update(
            {f"{name}.{key}".rstrip("."): leaf for key, leaf in inner.items() if isinstance(leaf, torch.Tensor)}
        )
    return found


def save_torch(root: Path, step: int) -> None:
    torch.save(state_of(step), root / f"step-{step}.pt")


def save_legacy(root: Path, step: int) -> None:
    torch.save(state_of(step), root / f"step-{step}.pt", _use_new_zipfile_serialization=False)


def load_torch(root: Path) -> Any:
    return torch.load(root / "step-20.pt")


def save_safetensors(root: Path, step: int) -> None:
    from safetensors.torch import save_file

    save_file(flat(state_of(step)), root / f"step-{step}.safetensors", {"step": str(step)})


def load_safetensors(root: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(root / "step-20.safetensors")


def gpt2(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def save_sharded(root: Path, step: int) -> None:
    gpt2(step).save_pretrained(root / f"step-{step}", max_shard_size="40KB")


def load_sharded(root: Path) -> Any:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(root / "step-20").state_dict()


def hf_trainer(root: Path, steps: int) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(32) + shift, "labels": torch.arange(32) + shift} for shift in range(40)]
    options = TrainingArguments(
        str(root), max_steps=steps, per_device_train_batch_size=2, save_steps=10, logging_steps=1000, use_cpu=True,
        report_to=[], disable_tqdm=True, seed=7,
    )  # fmt: skip
    return Trainer(gpt2(7), options, train_dataset=rows)


def save_hf(root: Path, step: int) -> None:
    if step == STEPS[-1]:  # one training makes both
        hf_trainer(root, step).train()


def load_hf(root: Path) -> Any:
    trainer = hf_trainer(root.parent / "resumed", STEPS[-1])
    trainer.train(resume_from_checkpoint=str(root / "checkpoint-20"))
    states = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    return {**states, "rng": torch.get_rng_state()}


def lightning_parts(root: Path, steps: int) -> tuple[Any, Any, Any]:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 96)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    L.seed_everything(7, verbose=False)
    keep = ModelCheckpoint(root, save_top_k=-1, every_n_train_steps=10, filename="{step}")
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, callbacks=[keep], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    return trainer, Model(), DataLoader(TensorDataset(torch.randn(64, 64)), 2)


def save_lightning(root: Path, step: int) -> None:
    if step == STEPS[-1]:
        trainer, model, loader = lightning_parts(root, step)
        trainer.fit(model, loader)


def load_lightning(root: Path) -> Any:
    trainer, model, loader = lightning_parts(root.parent / "resumed", STEPS[-1])
    trainer.fit(model, loader, ckpt_path=str(root / "step=20.ckpt"))
    return {"model": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def accelerated() -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    torch.manual_seed(7)
    model = nn.Linear(64, 96)
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def save_accelerate(root: Path, step: int) -> None:
    accelerator, model, optimizer = accelerated()
    for _ in range(step):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    accelerator.save_state(str(root / f"checkpoint_{step}"))


def load_accelerate(root: Path) -> Any:
    accelerator, model, optimizer = accelerated()
    accelerator.load_state(str(root / "checkpoint_20"))
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def save_deepspeed(root: Path, step: int) -> None:
    folder, state = root / f"global_step{step}", state_of(step)
    folder.mkdir()
    sizes = {"dp_world_size": 2, "ds_config": {"zero_optimization": {"stage": 1}}}
    torch.save({"module": state["model"], "global_steps": step, **sizes}, folder / "mp_rank_00_model_states.pt")
    for rank in (0, 1):
        part = {name: value[rank::2].clone() for name, value in state["optimizer"].items()}
        torch.save({"optimizer_state_dict": part}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text(folder.name)


def load_deepspeed(root: Path) -> Any:
    folder = root / (root / "latest").read_text().strip()
    names = ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1))]
    return {name: torch.load(folder / name) for name in names}


FORMATS = {
    "dcp": Format("DCP", "`dcp.load`", save_dcp, load_dcp),
    "dcp-safetensors": Format("DCP, safetensors", "`dcp.load`", save_dcp_safetensors, load_dcp_safetensors),
    "torch": Format("torch.save", "`torch.load`", save_torch, load_torch),
    "torch-legacy": Format("torch.save, legacy", "`torch.load`", save_legacy, load_torch),
    "safetensors": Format("safetensors", "`load_file`", save_safetensors, load_safetensors),
    "sharded": Format("safetensors with an index", "`from_pretrained`", save_sharded, load_sharded),
    "hf-trainer": Format("HF Trainer", "`train(resume_from_checkpoint=…)`", save_hf, load_hf),
    "lightning": Format("Lightning", "`fit(ckpt_path=…)`", save_lightning, load_lightning),
    "accelerate": Format("Accelerate", "`load_state`", save_accelerate, load_accelerate),
    "deepspeed": Format(
        "DeepSpeed's layout", "`latest`, then `torch.load` of each file", save_deepspeed, load_deepspeed
    ),
}


def digest(value: Any) -> str:
    """A digest of all values in a state, at any depth."""
    summary = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            summary.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            summary.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                add(f"{name}.{index}", inner)
        else:
            summary.update(f"{name} {value!r}".encode())

    add("", value)
    return summary.hexdigest()


def attempt(load: Callable[[Path], Any], root: Path) -> dict[str, str]:
    """{"loaded": digest} or {"raised": the error}."""
    try:
        return {"loaded": digest(load(root))}
    except BaseException as error:  # CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"raised": type(error).__name__}
    finally:
        shutil.rmtree(root.parent / "resumed", ignore_errors=True)


def main(what: str, name: str, where: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root, form = Path(where), FORMATS[name]
    if what == "save":
        root.mkdir(parents=True, exist_ok=True)
        for step in STEPS:
            form.save(root, step)
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for _line in sys.stdin:
        print(json.dumps(attempt(form.load, root)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
