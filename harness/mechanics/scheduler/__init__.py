"""How faults of a scheduler are done: Slurm's programs or kubectl give the orders, with the rights of the user."""
