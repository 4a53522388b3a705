"""pytorch-ignite 0.5.5: after a resume, ReduceLROnPlateauScheduler no longer reduces the learning rate.

    python ignite_plateau.py begin; python ignite_plateau.py resume

| | rates |
|---|---|
| begin | 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125 |
| resume, observed | 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5 |
| resume, expected | 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125 |

Likely cause: `param_scheduler.py:1717` puts its own method on PyTorch's scheduler (`self.scheduler._reduce_lr =
self._reduce_lr`). The state of PyTorch's scheduler is everything in its `__dict__` but the optimizer, so the state
holds that method, and with it the scheduler and the optimizer of the process that saved it: the rate of that copy is
reduced. With torch.load's default (`weights_only=True`) the load ends with an error, and with `trainer=` the save
does. Versions: Python 3.11.7, torch 2.13.0+cpu, pytorch-ignite 0.5.5 (newest in November 2026). We found no public
report.
"""

import sys

import torch
from ignite.engine import Engine
from ignite.handlers.param_scheduler import ReduceLROnPlateauScheduler

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
schedule = ReduceLROnPlateauScheduler(optimizer, "loss", factor=0.5, patience=1)
if sys.argv[1] == "resume":
    saved = torch.load("saved", weights_only=False)
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
rates = []
for step in range(8):
    engine = Engine(lambda engine, batch: None)
    engine.state.metrics = {"loss": 1.0}  # it never gets better
    schedule(engine)
    rates.append(optimizer.param_groups[0]["lr"])
    if sys.argv[1] == "begin" and step == 3:
        torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, "saved")
print(rates)
