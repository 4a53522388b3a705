"""Puts the optimizer's state back for the first parameter group only: a fine-tuning script that made the second group
later than its checkpoint code."""

from base import Trainer, main


class ForgetsOptimizerOfAGroup(Trainer):
    def load_optimizer(self, state):
        first = len(state["param_groups"][0]["params"])
        kept = {number: entry for number, entry in state["state"].items() if number < first}
        self.optimizer.load_state_dict({**state, "state": kept})


main(ForgetsOptimizerOfAGroup)
