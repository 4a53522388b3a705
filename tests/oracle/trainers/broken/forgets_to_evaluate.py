"""Evaluates after each save, and not again after a resume: a death between the two loses that evaluation for good, and
the only sign is a result that is missing."""

from base import main
from evaluation import Evaluating

main(Evaluating)
