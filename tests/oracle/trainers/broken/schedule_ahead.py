"""The schedule makes a step while it is put back, and is one ahead from then on: a scheduler that was made with
last_epoch."""

from base import Trainer, main


class ScheduleAhead(Trainer):
    def load_schedule(self, state):
        super().load_schedule(state)
        self.schedule.step()


main(ScheduleAhead)
