"""A GAN: in each iteration the critic makes a step, and then the generator."""

import torch
from base import PARTS, Trainer, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Gan(Trainer):
    """The base trainer's model is the critic."""

    critic_steps = 1

    def __init__(self, args):
        super().__init__(args)
        rng = torch.get_rng_state()
        torch.manual_seed(args.seed)
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        torch.set_rng_state(rng)
        self.makers = DistributedDataParallel(self.maker)
        self.generator = torch.optim.RMSprop(self.maker.parameters(), lr=1e-3)

    def step(self, batches):
        loss = 0.0
        for _ in range(self.critic_steps):
            loss += self.critic_step(batches)
        return loss + self.generator_step()

    def critic_step(self, batches):
        real = torch.cat([next(batches)[0] for _ in range(PARTS)])
        told = self.ddp(torch.cat([self.made(len(real)).detach(), real]))
        loss = told[: len(real)].mean() - told[len(real) :].mean()
        self.scaler.scale(loss).backward()
        self.update()
        self.sampler.position += 1
        return loss.item()

    def generator_step(self):
        loss = -self.model(self.made(4)).mean()
        self.generator.zero_grad()
        loss.backward()
        self.generator.step()
        self.optimizer.zero_grad()
        return loss.item()

    def made(self, count):
        return self.makers(torch.randn(count, 4))

    def shared_state(self):
        return {
            **super().shared_state(), "maker": self.maker.state_dict(), "generator": self.generator.state_dict(),
        }  # fmt: skip

    def load(self, folder):
        super().load(folder)
        shared = torch.load(folder / "trainer.pt")
        self.maker.load_state_dict(shared["maker"])
        self.load_generator(shared["generator"])

    def load_generator(self, state):
        self.generator.load_state_dict(state)


if __name__ == "__main__":
    main(Gan)
