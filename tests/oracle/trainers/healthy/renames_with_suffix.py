"""All state in one file, written as `ckpt-4.tmp` and renamed to `ckpt-4.pt` when it is whole: the number counts
checkpoints, and nothing in it tells of steps."""

import base
import torch
import torch.distributed as dist


class Trainer(base.Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.optimizer = torch.optim.SGD(self.optimizer.param_groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def save(self):
        number = -(-self.done // self.args.save_every)
        states = [None] * self.world
        dist.all_gather_object(states, self.own_state())
        if self.rank == 0:
            final = self.folder / f"ckpt-{number}.pt"
            shared = {name: value for name, value in self.shared_state().items() if name != "step"}
            torch.save({**shared, "model": self.model.state_dict(), "rng": states}, final.with_suffix(".tmp"))
            final.with_suffix(".tmp").rename(final)
        dist.barrier()

    def complete(self):
        return sorted(self.folder.glob("ckpt-*.pt"), key=lambda path: int(path.stem[5:]))

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.done = state["position"]
        self.model.load_state_dict(state["model"])
        self.load_optimizer(state["optimizer"])
        self.load_schedule(state["schedule"])
        self.load_scaler(state["scaler"])
        self.load_ema(state["ema"])
        self.load_position(state["position"])
        self.load_rng(state["rng"][self.rank])


if __name__ == "__main__":
    base.main(Trainer)
