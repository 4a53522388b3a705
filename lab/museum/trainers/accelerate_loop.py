"""Accelerate's loop for a resume in the middle of an epoch, as in its guide: skip_first_batches on the loader, with a
sampler that is seeded by the epoch. --order: whether the epoch is set before or after the skip."""

import json

import torch
import trainer_main
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

STEPS, SAVE_EVERY, PER_EPOCH = 24, 5, 8


class Loop:
    def __init__(self, order):
        self.order = order
        set_seed(0)
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = DataLoader(range(4 * PER_EPOCH * self.accelerator.num_processes), batch_size=4, shuffle=True)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def epoch(self, number, skip):
        if not skip:
            self.loader.set_epoch(number)
            return self.loader
        if self.order == "before":
            self.loader.set_epoch(number)
            return self.accelerator.skip_first_batches(self.loader, skip)
        rest = self.accelerator.skip_first_batches(self.loader, skip)
        rest.set_epoch(number)
        return rest


def plain(folder, order):
    del folder
    states = {}

    def run(name, done):
        loop, seen = Loop(order), []
        if done:
            torch.set_rng_state(states["whole", done])  # as load_state does
        for epoch in range(done // PER_EPOCH, STEPS // PER_EPOCH):
            for batch in loop.epoch(epoch, done % PER_EPOCH):
                seen.append(batch.tolist())
                done += 1
                states[name, done] = torch.get_rng_state()
        return seen

    both = {"whole": run("whole", 0)[10:], "resumed": run("resumed", 10)}
    same = torch.equal(states["whole", 15], states["resumed", 15])
    print(json.dumps({**both, "still": [] if same else ["checkpoint_integrity"]}))


def train(folder, order):
    loop = Loop(order)
    accelerator, done = loop.accelerator, 0
    table = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    found = {int(path.name[5:]): path for path in folder.glob("step-*") if (path / "whole").exists()}
    accelerator.wait_for_everyone()
    if found:
        done = max(found)
        accelerator.load_state(str(found[done]))
    while done < STEPS:
        for batch in loop.epoch(done // PER_EPOCH, done % PER_EPOCH):
            loss = loop.model(table[batch]).square().mean()
            loop.optimizer.zero_grad()
            accelerator.backward(loss)
            loop.optimizer.step()
            done += 1
            accelerator.print(f"step {done} loss {loss.item():.9g}", flush=True)
            if done % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / f"step-{done}"))
                accelerator.wait_for_everyone()
                (folder / f"step-{done}" / "whole").touch()
            if done == STEPS:
                break
    accelerator.end_training()


if __name__ == "__main__":
    trainer_main.main(plain, train, order={"choices": ("before", "after"), "required": True})
