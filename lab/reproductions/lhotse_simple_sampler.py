"""lhotse 1.33.0: after a resume on several ranks, SimpleCutSampler gives batches again.

    python lhotse_simple_sampler.py

Observed: rank 0 goes on with [4, 5], and rank 1 with [6, 7]. Expected: [8, 9] and [10, 11]. With two ranks the data
go back by half of what was done in the epoch. With `world_size=1`, and with Lhotse 1.4.0, the resume is right; 1.5.0
is the first release that is wrong. `ZipSampler` over such samplers is wrong too; the four dynamic samplers that were
tried are right.

Likely cause: a rank takes a batch for every rank and keeps its own, and only its own is counted
(`lhotse/dataset/sampling/base.py:328`); `load_state_dict` moves the data forward by that count (`simple.py:148`),
while the data are shared by all. 1.5.0 has https://github.com/lhotse-speech/lhotse/pull/773, which mended the dynamic
samplers. Versions: Python 3.11.7, torch 2.13.0+cpu, lhotse 1.33.0 (newest in November 2026). We found no public
report.
"""

from lhotse import CutSet
from lhotse.dataset.sampling import SimpleCutSampler
from lhotse.testing.dummies import DummyManifest


def sampler(rank):
    cuts = DummyManifest(CutSet, begin_id=0, end_id=24)
    return SimpleCutSampler(cuts, max_cuts=2, world_size=2, rank=rank)


def numbers(batches):
    return [[int(cut.id[-4:]) for cut in cuts] for cuts in batches]


for rank in (0, 1):
    whole = numbers(sampler(rank))
    begun, resumed = sampler(rank), sampler(rank)
    batches = iter(begun)
    next(batches), next(batches)
    resumed.load_state_dict(begun.state_dict())
    print(f"rank {rank}: {numbers(resumed)[:2]}, and it should be {whole[2:4]}")
