"""DeepSpeed's ZeRO-1 on two CPU ranks with gloo: `save_checkpoint` and `load_checkpoint`, with the step and the random
number generators as client state."""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 128, 8


class Batches:
    def __init__(self, seed, start, steps):
        self.seed, self.start, self.steps = seed, start, steps

    def __iter__(self):
        for step in range(self.start, self.steps):
            epoch, batch = divmod(step, SAMPLES // (2 * BATCH))
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + epoch))
            yield order[2 * BATCH * batch :][: 2 * BATCH][dist.get_rank() :: 2].tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(args.seed + 1 + dist.get_rank())

    done = 0
    if (args.dir / "latest").exists():
        _, about = engine.load_checkpoint(str(args.dir))
        done = about["step"]
        torch.set_rng_state(about["rng"][dist.get_rank()])

    loader = DataLoader(data, batch_sampler=Batches(args.seed, done, args.steps), generator=torch.Generator())
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        done += 1
        if dist.get_rank() == 0:
            print(f"step {done} loss {loss.item():.9g}", flush=True)
        if done % args.save_every == 0 or done == args.steps:
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, torch.get_rng_state())
            engine.save_checkpoint(str(args.dir), tag=f"global_step{done}", client_state={"step": done, "rng": states})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
