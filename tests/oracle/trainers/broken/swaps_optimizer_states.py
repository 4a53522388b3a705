"""Makes its parameters in another order than the process that saved: torch's load_state_dict goes by their place
alone, and the states of two parameters of one shape change places without a word."""

from base import Trainer, main


class SwapsOptimizerStates(Trainer):
    def load_optimizer(self, state):
        first = len(state["param_groups"][0]["params"])
        states = dict(state["state"])
        states[first], states[first + 1] = states[first + 1], states[first]
        self.optimizer.load_state_dict({**state, "state": states})


main(SwapsOptimizerStates)
