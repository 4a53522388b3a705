"""Saves the average of the weights only until the first restart: the option for it is not put back. What is shipped
in the end is of before the kill."""

from base import attempt, main
from flat import Flat


class StopsSavingEma(Flat):
    def parts(self):
        found = super().parts()
        if attempt():
            found.pop("ema", None)
        return found

    def load_ema(self, state):
        """It goes on in memory."""
        self.ema = state


main(StopsSavingEma)
