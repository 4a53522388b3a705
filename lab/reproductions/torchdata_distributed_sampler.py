"""torchdata 0.11.0: the state of StatefulDistributedSampler lacks its epoch.

    python torchdata_distributed_sampler.py

A job that loads the state of the loader in the middle of a later epoch, and does not set the epoch again, goes on in
the order of the first epoch, without a message. A job that sets the epoch once for each epoch, and loads its state
before that, is right.

| | observed |
|---|---|
| rest of the epoch, without a resume | 11, 0, 5, 3, 2, 9, 10, 7 |
| after the resume | 7, 4, 2, 10, 3, 1, 11, 6: the same places in the order of epoch 0 |
| expected after the resume | 11, 0, 5, 3, 2, 9, 10, 7 |

Likely cause: `state_dict` of the sampler (`torchdata/stateful_dataloader/sampler.py:208`) holds the number of samples
that were yielded, and not the epoch. Known: https://github.com/meta-pytorch/data/pull/1515 of December 2025 adds the
epoch, in no release yet. Versions: Python 3.11.7, torch 2.13.0+cpu, torchdata 0.11.0 (newest in November 2026).
"""

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def loader():
    sampler = StatefulDistributedSampler(list(range(12)), num_replicas=1, rank=0, shuffle=True, seed=0)
    return StatefulDataLoader(list(range(12)), batch_size=4, sampler=sampler), sampler


whole, sampler = loader()
sampler.set_epoch(1)
batches = iter(whole)
next(batches)
state = whole.state_dict()
rest = [batch.tolist() for batch in batches]
resumed, sampler = loader()
resumed.load_state_dict(state)
print("epoch of the sampler after the load:", sampler.epoch)
print("rest of the epoch:", rest)
print("after a resume:   ", [batch.tolist() for batch in resumed])
