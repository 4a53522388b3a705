"""TorchTitan's CheckpointManager, which saves by torch.distributed.checkpoint, around a small FSDP2 model on CPU ranks.
Its train state has the step and the random number generator of each rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchtitan.components.checkpointer.dcp import CheckpointManager

SAMPLES, BATCH = 128, 8
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Batches:
    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        ranks = dist.get_world_size()
        for step in range(self.start, self.end):
            epoch, batch = divmod(step, SAMPLES // (ranks * BATCH))
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            yield order[ranks * BATCH * batch :][: ranks * BATCH][dist.get_rank() :: ranks].tolist()


class Optimizer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class Train:
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step), f"rng-{dist.get_rank()}": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.step = int(state["step"])
        torch.set_rng_state(state[f"rng-{dist.get_rank()}"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--keep", type=int, default=0, help="how many checkpoints are kept; 0: all")
    parser.add_argument("--mode", default="disabled", choices=["disabled", "async"])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * args.steps)
    torch.manual_seed(1 + dist.get_rank())

    train = Train()
    config = CheckpointManager.Config(
        enable=True, interval=args.save_every, async_mode=args.mode, keep_latest_k=args.keep
    )
    manager = CheckpointManager(
        config, dataloader=None, model_parts=[model], optimizers=Optimizer(model, optimizer), lr_schedulers=scheduler,
        states={"train_state": train}, sd_adapter=None, base_folder=args.dir,
    )  # fmt: skip
    del manager.states["dataloader"]  # there is nothing to save
    manager.load()

    loader = DataLoader(data, batch_sampler=Batches(train.step, args.steps), generator=torch.Generator())
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        train.step += 1
        if dist.get_rank() == 0:
            print(f"step {train.step} loss {loss.item():.9g}", flush=True)
        manager.save(train.step)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
