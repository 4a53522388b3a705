"""Storage faults: our own file system over the checkpoint folder, in which chosen operations of chosen ranks fail, are
slow or hang; and a full disk."""
