"""The command line that all trainers of the museum share."""

import argparse
from pathlib import Path

import torch


def main(plain, train, **flags):
    """Calls `plain` (the trainer's own proof) if --plain is given, and otherwise `train`, which needs torchrun. Both
    get the folder, and the values of the options in `flags`: settings of argparse, by name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    for name, settings in flags.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    (plain if options.plain else train)(options.dir, **{name: getattr(options, name) for name in flags})
