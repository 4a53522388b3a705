"""DeepSpeed with ZeRO-1 on CPU ranks, and its own checkpoints (save_checkpoint and load_checkpoint). The client state
has the step and the random number generator of each rank."""

import argparse
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 128, 8
# Its compilation takes minutes.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


class Batches:
    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        ranks = dist.get_world_size()
        for step in range(self.start, self.end):
            epoch, batch = divmod(step, SAMPLES // (ranks * BATCH))
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            yield order[ranks * BATCH * batch :][: ranks * BATCH][dist.get_rank() :: ranks].tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_rest = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(1 + dist.get_rank())

    path, client = engine.load_checkpoint(args.dir)
    start = client["step"] if path else 0
    if path:
        torch.set_rng_state(client["rng"][dist.get_rank()])
    loader = DataLoader(data, batch_sampler=Batches(start, args.steps), generator=torch.Generator())
    for step, (x, y) in enumerate(loader, start + 1):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        if step % args.save_every == 0:
            rng = [None] * dist.get_world_size()
            dist.all_gather_object(rng, torch.get_rng_state())
            engine.save_checkpoint(args.dir, client_state={"step": step, "rng": rng})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
