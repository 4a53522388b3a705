"""Finds the proof that a fault was felt. Injectors call it. Input: a record and the name of a fault. Output:
`Evidence`, or None if nothing proves it. The target's own agent is never a sufficient witness."""
