"""Storage faults: a file system of torchaos over the checkpoint folder, in which chosen operations of chosen ranks
fail, are slow or hang; and a full disk."""
