"""A loss that is no number: all ranks go back to a state that they kept in memory, and do the steps since then again.
No file is read."""

import copy

import base
import rolls_back_in_process


class Trainer(rolls_back_in_process.Trainer):
    kept = None

    def after_step(self):
        super().after_step()
        if self.done % 4 == 0:
            self.kept = copy.deepcopy((self.model.state_dict(), self.shared_state(), self.own_state()))

    def resume(self):
        if self.kept is None:
            super().resume()
            return
        model, shared, own = copy.deepcopy(self.kept)
        self.done = shared["step"]
        self.model.load_state_dict(model)
        self.load_optimizer(shared["optimizer"])
        self.load_schedule(shared["schedule"])
        self.load_scaler(shared["scaler"])
        self.load_ema(shared["ema"])
        self.load_position(shared["position"])
        self.load_rng(own)


if __name__ == "__main__":
    base.main(Trainer)
