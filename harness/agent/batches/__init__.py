"""The batches that the training loop receives, which of them it trains on, and digests of their samples."""
