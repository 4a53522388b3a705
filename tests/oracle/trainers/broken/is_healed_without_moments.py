"""torchft with two replicas: one that comes back takes the weights of the other, and begins the optimizer's moments
anew."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "healthy"))

import torchft_ddp

if __name__ == "__main__":
    torchft_ddp.main(moments=False)
