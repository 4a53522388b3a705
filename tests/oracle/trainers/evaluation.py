"""A trainer that evaluates after each save, and writes the result beside the checkpoints."""

import copy
import json
import time

import torch
from base import Trainer

LASTS_S = 1.5  # long enough that the death of another rank ends it


class Evaluating(Trainer):
    def after_step(self):
        super().after_step()
        if self.done % self.args.save_every == 0:
            self.evaluate()

    def result(self):
        return self.folder / f"evaluation-{self.done}.json"

    def evaluate(self):
        """On a copy of the model, so that neither buffers nor random numbers change."""
        if self.rank == 0:
            points = self.loader.dataset
            with torch.no_grad():
                loss = self.loss(copy.deepcopy(self.model).eval(), (points.x[:8], points.y[:8])).item()
            time.sleep(LASTS_S)
            self.result().write_text(json.dumps({"step": self.done, "loss": loss}))
