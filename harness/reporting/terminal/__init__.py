"""All output on a terminal, and the sentences that other outputs share with it."""
