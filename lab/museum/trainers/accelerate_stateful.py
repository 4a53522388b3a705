"""Accelerate with its stateful data loader on two ranks: save_state and load_state keep the loader's place."""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import trainer_main
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

STEPS, SAVE_EVERY, PER_EPOCH = 24, 5, 8


def train(folder, until=STEPS):
    """Trains on from the newest checkpoint, up to the step `until`. Writes the samples of each step of this rank."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    table = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(8, 1)
    ranks = accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(range(4 * PER_EPOCH * ranks), batch_size=4)
    )
    found = {int(path.name[5:]): path for path in folder.glob("step-*") if (path / "whole").exists()}
    accelerator.wait_for_everyone()
    done, seen = max(found, default=0), []
    if found:
        accelerator.load_state(str(found[done]))
    while done < until:
        for batch in loader:
            loss = model(table[batch]).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            done += 1
            seen.append([done, *batch.tolist()])
            accelerator.print(f"step {done} loss {loss.item():.9g}", flush=True)
            if done % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / f"step-{done}"))
                accelerator.wait_for_everyone()
                (folder / f"step-{done}" / "whole").touch()
            if done == until:
                break
    (folder / f"seen-{accelerator.process_index}-{until}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def plain(folder, until):
    """Two ranks in one go, and two ranks that are started a second time."""
    del until
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    seen = {"whole": [], "resumed": []}
    for name, ends in (("whole", [STEPS]), ("resumed", [10, STEPS])):
        for end in ends:
            command = [*launch, "--dir", str(folder / name), "--until", str(end)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for rank in range(2):
            parts = (json.loads(Path(folder / name / f"seen-{rank}-{end}.json").read_text()) for end in ends)
            seen[name] += [batch for part in parts for batch in part]
    whole, resumed = (
        torch.load(folder / name / "step-15" / "random_states_0.pkl", weights_only=False)["torch_manual_seed"]
        for name in ("whole", "resumed")
    )
    print(json.dumps({**seen, "still": [] if torch.equal(whole, resumed) else ["checkpoint_integrity"]}))


if __name__ == "__main__":
    trainer_main.main(plain, train, until={"type": int, "default": STEPS})
