"""A loop with Accelerate on two CPU ranks: `save_state`, and `load_state` with `skip_first_batches` on resume. Starting
a loader draws from the generator that dropout draws from, so its state is put back once more when the first batch is
there."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--stock-sampler", action="store_true", help="the one that is the default")
    args = parser.parse_args()
    project = ProjectConfiguration(str(args.dir), automatic_checkpoint_naming=True, total_limit=3)
    loading = DataLoaderConfiguration(use_seedable_sampler=not args.stock_sampler)
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=loading)
    set_seed(args.seed)
    data = TensorDataset(torch.randn(128, 16), torch.randn(128, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * args.steps)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, 8, shuffle=True)
    )
    set_seed(args.seed, device_specific=True)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    rng = None
    saved = args.dir / "checkpoints"
    if saved.exists() and any(saved.iterdir()):
        accelerator.load_state()
        accelerator.project_configuration.iteration = progress.step // args.save_every
        # At the end of an epoch, the job that is not interrupted starts a loader after the save, too.
        rng = torch.get_rng_state() if progress.step % len(loader) else None

    epoch, skip = divmod(progress.step, len(loader))
    while progress.step < args.steps:
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, skip) if skip else loader:
            if rng is not None:
                torch.set_rng_state(rng)
                rng = None
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % args.save_every == 0:
                accelerator.save_state()
            if progress.step == args.steps:
                break
        epoch, skip = epoch + 1, 0
    accelerator.end_training()


if __name__ == "__main__":
    main()
