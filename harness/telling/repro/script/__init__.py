"""What the script is made of. Standard library only, for Python 3.9; summary.py is run by the job's own Python."""
