"""Damaged input of every kind that the harness and the agent read, and a guard that detects harm.

`inputs` has the valid inputs, `mutate` damages bytes, `targets` feeds them to the product and knows which results are
allowed, and `guard` refuses harm.
"""
