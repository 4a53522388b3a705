"""What is observed from outside the job while it runs: its processes, its output, and whether it hangs.

Process ids and log files come in; events go out. It changes nothing, and decides nothing about verdicts."""
