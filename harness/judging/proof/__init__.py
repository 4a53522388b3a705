"""Finds the proof that a fault was felt; injectors call it. In: a record and the name of a fault. Out: `Evidence`, or
None if nothing proves it. The agent of the target is never a sufficient witness."""
