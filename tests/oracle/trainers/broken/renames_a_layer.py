"""Keeps the generator's optimizer state by the names of parameters, and still looks for a layer under its old name:
what is not found begins afresh, without a word."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "healthy"))

from base import main
from gan import Gan


class RenamesALayer(Gan):
    def shared_state(self):
        state = {name: self.generator.state[one] for name, one in self.maker.named_parameters()}
        return {**super().shared_state(), "generator": state}

    def load_generator(self, state):
        ours = dict(self.maker.named_parameters())
        for name, saved in state.items():
            name = name.replace("2.", "head.")
            if name in ours:
                self.generator.state[ours[name]] = saved


main(RenamesALayer)
