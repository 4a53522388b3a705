"""A sampler of Lhotse, resumed by its own state in every attempt. It is never told of the epoch, so every epoch has the
same order. --dynamic: a DynamicCutSampler; --half: the sampler of the second of two ranks."""

import sys
import types

# They need another Python, or torchaudio, and are not used here.
for name, parts in (
    ("features.kaldifeat", ("KaldifeatFbank", "KaldifeatFbankConfig", "KaldifeatMfcc", "KaldifeatMfccConfig")),
    ("workflows.forced_alignment", ("align_with_torchaudio",)),
):
    sys.modules[f"lhotse.{name}"] = hidden = types.ModuleType(name)
    for part in parts:
        setattr(hidden, part, object)

import data_loop
import torch
from lhotse import CutSet
from lhotse.dataset.sampling import DynamicCutSampler, SimpleCutSampler
from lhotse.testing.dummies import DummyManifest

DYNAMIC, HALF = "--dynamic" in sys.argv, "--half" in sys.argv
sys.argv = [word for word in sys.argv if word not in ("--dynamic", "--half")]
torch.utils.data.Sampler.__init__ = lambda self, *args, **more: None  # it no longer takes the data source


class Cuts(data_loop.Data):
    def __init__(self, folder, rank, world):
        del folder, rank, world
        cuts = DummyManifest(CutSet, begin_id=0, end_id=64 if HALF else 32)
        kind, size = (DynamicCutSampler, 4) if DYNAMIC else (SimpleCutSampler, 5)
        self.sampler = kind(cuts, max_cuts=size, shuffle=True, world_size=1 + HALF, rank=int(HALF))

    def epoch(self, number):
        del number
        for cuts in self.sampler:
            yield torch.tensor([int(cut.id.rsplit("-", 1)[1]) for cut in cuts])

    def state(self):
        return self.sampler.state_dict()

    def load(self, state):
        self.sampler.load_state_dict(state)


if __name__ == "__main__":
    data_loop.main(Cuts, [10])
