"""One scenario with the fault-free runs that it is judged against, and their cache."""
