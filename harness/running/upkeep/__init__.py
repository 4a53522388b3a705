"""The runs of this user on this machine: which there are, ending them, and removing old run directories."""
