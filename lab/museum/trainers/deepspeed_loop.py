"""DeepSpeed with bfloat16 and ZeRO stage 0 on a CPU, resumed by its own checkpoints. --clear: the loop clears the
gradients itself, because some releases do not do it with this configuration. DeepSpeed begins with a step of the
optimizer, so a counter of steps, as in AdamW, is one ahead of the training: Lion has none."""

import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
import trainer_main
from torch import nn
from torch.utils.data import DataLoader

STEPS, SAVE_EVERY = 24, 5
# Its compilation takes minutes.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


class Lion(torch.optim.Optimizer):
    """A step of the same size in each direction, however large the gradients are."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                mean = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                weight.sub_(group["lr"] * torch.lerp(weight.grad, mean, 0.9).sign())
                mean.lerp_(weight.grad, 0.01)


class Loop:
    def __init__(self, clear):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
        optimizer = Lion(model.parameters(), {"lr": 1e-2})
        self.engine, *_rest = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.done, self.clear, self.batches = 0, clear, None

    def step(self):
        if self.batches is None:
            self.batches = iter(DataLoader(self.table, batch_size=None, sampler=range(self.done, STEPS)))
        loss = (self.engine(next(self.batches)) - 1).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        if self.clear:
            self.engine.zero_grad()
        self.done += 1
        print(f"step {self.done} loss {loss.item():.9g}", flush=True)

    def save(self, folder):
        self.engine.save_checkpoint(str(folder), client_state={"step": self.done})

    def load(self, folder):
        path, client = self.engine.load_checkpoint(str(folder))
        self.done = client["step"] if path else 0


def plain(folder, clear):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)

    def run(loop, steps):
        seen = []
        while loop.done < steps:
            loop.step()
            seen.append([loop.done, *next(loop.engine.module.parameters())[0].tolist()])
        return seen

    whole = run(Loop(clear), STEPS)
    begun, resumed = Loop(clear), Loop(clear)
    first = run(begun, 10)
    begun.save(folder / "saved")
    resumed.load(folder / "saved")
    print(json.dumps({"whole": whole, "resumed": first + run(resumed, STEPS)}))


def train(folder, clear):
    loop = Loop(clear)
    loop.load(folder)
    while loop.done < STEPS:
        loop.step()
        if loop.done % SAVE_EVERY == 0:
            loop.save(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(plain, train, clear={"action": "store_true"})
