"""The collectives of this rank: the hooks that see them, one call of a collective, and when each begins and ends."""
