"""torchmetrics 1.9.0: MinMaxMetric forgets its extremes, also with persistent states.

    python torchmetrics_minmax.py

Observed: tensor(1.) tensor(-inf). Expected: the same value twice. After a resume, a model that is kept for its best
metric is chosen anew.

Likely cause: the two values are attributes and no states (`torchmetrics/wrappers/minmax.py`, lines 79 and 80). Known:
https://github.com/Lightning-AI/torchmetrics/issues/3323; the change
https://github.com/Lightning-AI/torchmetrics/pull/3389 is merged, in no release yet. Versions: Python 3.11.7, torch
2.13.0+cpu, torchmetrics 1.9.0.
"""

import torch
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.wrappers import MinMaxMetric


def metric():
    made = MinMaxMetric(BinaryAccuracy())
    made.persistent(True)
    return made


begun, resumed = metric(), metric()
begun.update(torch.tensor([1, 0, 1, 0]), torch.tensor([1, 0, 1, 0]))
begun.compute()
resumed.load_state_dict(begun.state_dict())
print(begun.max_val, resumed.max_val)
