"""Where a run differs from the same job without a fault, and the likeliest cause. Pure.

The histories of two runs come in; differences in losses, learning rates, samples, parameters and checkpoints go out."""
