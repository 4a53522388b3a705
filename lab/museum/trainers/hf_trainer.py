"""Hugging Face's Trainer, resumed from its newest checkpoint. --stop: with EarlyStoppingCallback, and a metric that
gets worse from the first evaluation on. --accumulate: two batches a step, and an epoch of 9 batches."""

import json
import os

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # old versions load generators' states with pickle

import torch
import trainer_main
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Samples(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "index": torch.tensor(index)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.register_buffer("batches", torch.zeros(()))
        self.seen = []

    def forward(self, x, index):
        if not self.training:
            return {"loss": self.batches.clone()}  # worse each time
        self.batches += 1
        self.seen.append(index.tolist())
        return {"loss": self.net(x).square().mean()}


class Died(Exception):
    pass


class DyingNet(Net):
    def forward(self, x, index):
        if len(self.seen) == 12:
            raise Died
        return super().forward(x, index)


def trainer(folder, stop, accumulate, net=Net):
    set_seed(0)
    more = {"save_steps": 5}
    if accumulate:
        more = {"save_steps": 4, "gradient_accumulation_steps": 2}
    if stop:
        more = {"save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
                "greater_is_better": False, "metric_for_best_model": "loss", "label_names": ["index"],
                "restore_callback_states_from_checkpoint": True}  # fmt: skip
    args = TrainingArguments(
        output_dir=str(folder), num_train_epochs=3, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, seed=0, remove_unused_columns=False, prediction_loss_only=True,
        **more,
    )  # fmt: skip
    return Trainer(
        net(), args, train_dataset=Samples(36 if accumulate else 32), eval_dataset=Samples(8) if stop else None,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=4)] if stop else [],
    )  # fmt: skip


def plain(folder, stop, accumulate):
    whole = trainer(folder / "whole", stop, accumulate)
    whole.train()
    begun = trainer(folder / "resumed", stop, accumulate, DyingNet)
    try:
        begun.train()
    except Died:
        pass
    newest = get_last_checkpoint(str(folder / "resumed"))
    resumed = trainer(folder / "resumed", stop, accumulate)
    resumed.train(resume_from_checkpoint=newest)
    if accumulate:
        print(json.dumps({"whole": [whole.state.global_step], "resumed": [resumed.state.global_step]}))
        return
    kept = begun.model.seen[: int(newest.rsplit("-", 1)[1])]
    print(json.dumps({"whole": whole.model.seen, "resumed": kept + resumed.model.seen}))


def train(folder, stop, accumulate):
    trainer(folder, stop, accumulate).train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(plain, train, stop={"action": "store_true"}, accumulate={"action": "store_true"})
