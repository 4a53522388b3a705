"""torchft with two replicas, whose gradients torchft's own DistributedDataParallel exchanges: in torchft 0.2.0, the one
that waits for the other when it dies fails an assertion, and dies too. Both begin anew."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "healthy"))

import torchft_ddp
from torchft import DistributedDataParallel

if __name__ == "__main__":
    torchft_ddp.main(DistributedDataParallel, lambda manager, net: None)
