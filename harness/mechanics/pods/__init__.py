"""How faults of pods are done: the API server of the cluster carries them out, with the rights of the user."""
