"""torchdata 0.11.0: with a generator and without workers, the epoch after a resume has another order.

    python torchdata_generator.py

Observed: True, then False. Expected: True twice, as with `num_workers=1`.

Likely cause: an iterator of the loader draws twice from the generator: the order of the samples, then a seed for
workers (`torch/utils/data/dataloader.py:690`). A resume calls that constructor (`stateful_dataloader.py:468`), then
puts the generator back to the state before the order was drawn and draws the order again
(`stateful_dataloader.py:533`, `sampler.py:69`). The seed is not drawn again, so the generator is one draw behind when
the next epoch begins. Versions: Python 3.11.7, torch 2.13.0+cpu, torchdata 0.11.0 (newest in November 2026). We found
no public report.
"""

import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def loader():
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(range(12), batch_size=4, shuffle=True, num_workers=0, generator=generator)


def epoch(data):
    return [batch.tolist() for batch in data]


whole = loader()
first, second = epoch(whole), epoch(whole)
begun, resumed = loader(), loader()
next(iter(begun))
resumed.load_state_dict(begun.state_dict())
print("rest of the first epoch right:", epoch(resumed) == first[1:])
print("second epoch right:", epoch(resumed) == second)
