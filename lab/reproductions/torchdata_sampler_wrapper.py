"""torchdata 0.11.0: with SamplerWrapper, a resume in a later epoch takes the order of the first.

    python torchdata_sampler_wrapper.py

Observed: after the samples 1, 4, 6 and 8 of the second epoch, a resume goes on with 7, 4, 2, 10, 3, 1, 11, 6: 4, 1
and 6 again, and 0, 5 and 9 never. Expected: 11, 0, 5, 3, 2, 9, 10, 7. Later epochs are right.

Likely cause: for a sampler with a state of its own, `SamplerWrapper.reset` restores that state and not the epoch
(`torchdata/nodes/adapters.py`, lines 126 to 128); `set_epoch` is called only for other samplers (line 131). Known:
https://github.com/meta-pytorch/data/issues/1513 (open). Versions: Python 3.11.7, torch 2.13.0+cpu, torchdata 0.11.0.
"""

import torchdata.nodes as nodes
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def sampler():
    return nodes.SamplerWrapper(StatefulDistributedSampler(range(12), num_replicas=1, rank=0, shuffle=True, seed=0))


begun, resumed = sampler(), sampler()
begun.reset()
list(begun)  # the first epoch
begun.reset()
first = [next(begun) for _ in range(4)]
state = begun.state_dict()
print("in one go", first + list(begun))
resumed.reset(state)
print("resumed  ", first + list(resumed))
