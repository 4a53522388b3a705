"""A plain DDP loop around a framework's data loading. The loop restores everything else, so that only the data can be
wrong after a resume. A row gives a class with `epoch` (the batches of an epoch, from the place that `load` set),
`state` and `load`."""

import io
import json
import os
from functools import partial

import torch
import torch.distributed as dist
import trainer_main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 5


class Data:
    epochs = 3  # of 8 batches
    epoch_ends = False  # saves at the end of each epoch, when the loader is used up, and at no other time

    def __init__(self, folder, rank, world):
        """Makes the loader. `folder` is the same in every attempt."""

    def epoch(self, number):
        """Yields batches: tensors of sample numbers."""
        raise NotImplementedError

    def state(self):
        raise NotImplementedError

    def load(self, state):
        raise NotImplementedError


def newest(folder):
    found = {int(path.stem[5:]): path for path in folder.glob("step-*.pt")}
    return found[max(found)] if found else None


def train(kind, folder):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    table = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = kind(folder, rank, world)
    done, begun = 0, 0
    path = newest(folder)
    dist.barrier()  # no rank saves before every rank has looked for a checkpoint
    if path is not None:
        saved = torch.load(path, weights_only=False)
        done, begun = saved["step"], saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load(saved["data"][rank])
    ddp = DistributedDataParallel(model)

    def save(epoch):
        states = [None] * world
        dist.all_gather_object(states, data.state())
        if rank == 0:
            partial = folder / "partial"
            torch.save({"step": done, "epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "data": states}, partial)  # fmt: skip
            partial.rename(folder / f"step-{done}.pt")
        dist.barrier()

    for epoch in range(begun, data.epochs):
        for batch in data.epoch(epoch):
            loss = ddp(table[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if rank == 0:
                print(f"step {done} loss {loss.item():.9g}", flush=True)
            if done % SAVE_EVERY == 0 and not data.epoch_ends:
                save(epoch)
        if data.epoch_ends:
            save(epoch + 1)
    dist.barrier()
    dist.destroy_process_group()


def plain(kind, cuts, folder):
    """Prints the batches of an uninterrupted run, and of a run in parts: each part begins from the state that the part
    before saved after `cut` batches (or after the epoch with these batches). Uses no model and no process group. If the
    batches are equal and the states after 20 batches are not, checkpoints must differ too."""
    later = {}

    def run(name, stops):
        seen, state, begun = [], None, 0
        for stop in [*stops, None]:
            data = kind(folder / name, 0, 1)
            if state is not None:
                state = torch.load(io.BytesIO(state), weights_only=False)
                begun = state["epoch"]
                data.load(state["data"])
            for epoch in range(begun, data.epochs):
                for batch in data.epoch(epoch):
                    seen.append(batch.tolist())
                    if len(seen) == 20 and not data.epoch_ends:
                        state_then = json.dumps(data.state(), default=str, sort_keys=True)
                        later[name] = state_then.replace(str(folder / name), "")
                    if len(seen) == stop and not data.epoch_ends:
                        break
                if len(seen) == stop:
                    state = saved(epoch + data.epoch_ends, data)
                    break
        return seen

    def saved(epoch, data):
        file = io.BytesIO()
        torch.save({"epoch": epoch, "data": data.state()}, file)
        return file.getvalue()

    for name in ("whole", "resumed"):
        (folder / name).mkdir(parents=True)
    both = {"whole": run("whole", []), "resumed": run("resumed", cuts)}
    differ = both["whole"] == both["resumed"] and later.get("whole") != later.get("resumed")
    print(json.dumps({**both, "still": ["checkpoint_integrity"] if differ else []}), flush=True)
    os._exit(0)  # loaders leave threads and worker processes behind


def main(kind, cuts):
    trainer_main.main(partial(plain, kind, cuts), partial(train, kind))
