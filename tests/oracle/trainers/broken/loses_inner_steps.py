"""DiLoCo: each rank trains by itself for four steps, then an outer optimizer takes the mean of what they moved by. A
resume takes the weights of the last meeting: what each rank trained since is lost, and its optimizer goes on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "healthy"))

import base
import diloco
import torch


class LosesInnerSteps(diloco.DiLoCo):
    def load(self, folder):
        super().load(folder)
        with torch.no_grad():
            for common, own in zip(self.common, self.model.parameters(), strict=True):
                own.copy_(common)


if __name__ == "__main__":
    base.main(LosesInnerSteps)
