"""The parts of the script. Standard library only, for Python 3.9; the job's own Python runs summary.py."""
