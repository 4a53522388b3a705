"""Two files, a.pt and b.pt, which are written in turn, and a resume takes the one of the later step. Which comes next
is counted in the process, so that after a restart they may change places with those of the twin."""

import torch
from base import main
from whole import Whole


class TwoSlots(Whole):
    turn = 0

    def path(self):
        self.turn += 1
        return self.folder / ("a.pt" if self.turn % 2 else "b.pt")

    def complete(self):
        found = [path for name in ("a.pt", "b.pt") if (path := self.folder / name).exists()]
        return sorted(found, key=lambda path: torch.load(path, weights_only=False)["step"])


main(TwoSlots)
