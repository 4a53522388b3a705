"""Stores the results of many runs, and compares two sets of them."""
