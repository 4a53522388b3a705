"""What is done to a node that is a container, through the Docker engine of this machine."""
