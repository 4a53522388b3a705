"""The checkpoint is written between the optimizer's and the scheduler's step, so that the schedule is one behind after
a resume."""

from base import Trainer, main


class ScheduleBehind(Trainer):
    def shared_state(self):
        state = super().shared_state()
        behind = self.schedule.last_epoch - 1
        state["schedule"] = {**state["schedule"], "last_epoch": behind}
        state["optimizer"] = {
            **state["optimizer"],
            "param_groups": [
                {**group, "lr": group["initial_lr"] * self.rate(behind)} for group in state["optimizer"]["param_groups"]
            ],
        }
        return state


main(ScheduleBehind)
