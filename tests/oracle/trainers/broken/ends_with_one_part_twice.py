"""Writes, at its end, rank 0's part of the weights on every rank: the last checkpoint is without rank 1's. No resume
reads it, and the twin does the same."""

from base import Trainer, main


class EndsWithOnePartTwice(Trainer):
    def part(self):
        return 0 if self.done == self.last else self.rank


main(EndsWithOnePartTwice)
