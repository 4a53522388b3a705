"""A small FSDP2 loop with a folder of torch.distributed.checkpoint every three steps, named `step_N`; all of its state
is in it."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, EVERY = 24, 3


class Sharded:
    def __init__(self, args):
        self.folder, self.done, self.rank = args.dir, 0, dist.get_rank()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(args.seed)
        self.model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 16))
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        torch.manual_seed(args.seed + 1 + self.rank)

    def train(self):
        newest = self.newest()
        dist.barrier()  # nobody saves before everybody has looked
        if newest is not None:
            self.load(newest)
        while self.done < STEPS:
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(self.model(x), x.flip(1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            if self.rank == 0:
                print(f"step {self.done} loss {loss.item():.9g}", flush=True)
            self.after_step()
        self.finish()

    def after_step(self):
        if self.done % EVERY == 0:
            dcp.save(self.state(), checkpoint_id=self.folder / f"step_{self.done}")

    def finish(self):
        dist.destroy_process_group()

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {f"rng-{self.rank}": torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.done), **own}

    def newest(self):
        whole = [path.parent for path in self.folder.glob("step_*/.metadata")]
        return max(whole, key=lambda path: int(path.name[5:]), default=None)

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.done = int(state["step"])
        torch.set_rng_state(state[f"rng-{self.rank}"])


def main(kind=Sharded):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind(args).train()
