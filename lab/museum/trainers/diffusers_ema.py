"""A plain loop with the EMA of diffusers, which is saved and restored by its own state, or with --pretrained by
`save_pretrained` and `from_pretrained`, as in diffusers' own training scripts. No loss depends on it."""

import json
import shutil
import sys

import torch
import torch.distributed as dist
import trainer_main
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.training_utils import EMAModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY = 24, 5
PRETRAINED = "--pretrained" in sys.argv
if PRETRAINED:
    sys.argv.remove("--pretrained")


class Net(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Linear(width, 1)

    def forward(self, x):
        return self.net(x)


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        named = {"model_cls": Net, "model_config": self.model.config} if PRETRAINED else {}
        self.ema = EMAModel(self.model.parameters(), decay=0.99, min_decay=0.0, **named)
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
        self.done = 0

    def step(self):
        loss = self.wrapped(self.table[self.done]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ema.step(self.model.parameters())
        self.done += 1
        print(f"step {self.done} loss {loss.item():.9g}", flush=True)

    def save(self, path):
        partial = path.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        state = {"step": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if PRETRAINED:
            self.ema.save_pretrained(partial / "ema")
        else:
            state["ema"] = self.ema.state_dict()
        torch.save(state, partial / "state.pt")
        partial.rename(path)

    def load(self, path):
        saved = torch.load(path / "state.pt", weights_only=False)
        self.done = saved["step"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if PRETRAINED:
            self.ema = EMAModel.from_pretrained(path / "ema", Net)
        else:
            self.ema.load_state_dict(saved["ema"])


def plain(folder):
    def run(loop, steps):
        seen = []
        while loop.done < steps:
            loop.step()
            seen.append([loop.done, *(round(value, 6) for value in loop.ema.shadow_params[1].tolist())])
        return seen

    begun, resumed = Loop(), Loop()
    first = run(begun, 10)
    begun.save(folder / "saved")
    resumed.load(folder / "saved")
    print(json.dumps({"whole": run(Loop(), STEPS), "resumed": first + run(resumed, STEPS)}))


def train(folder):
    dist.init_process_group("gloo")
    loop = Loop()
    found = {int(path.name[5:]): path for path in folder.glob("step-*")}
    if found:
        loop.load(found[max(found)])
    while loop.done < STEPS:
        loop.step()
        if loop.done % SAVE_EVERY == 0 or loop.done == STEPS:
            loop.save(folder / f"step-{loop.done}")
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(plain, train)
