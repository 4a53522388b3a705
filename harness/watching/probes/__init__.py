"""Which processes are the ranks, how they end, and what the lines of the job's log say."""
