"""Damaged input of every kind that the harness and the agent read, and a guard that sees what harm it does.

`mutate` damages bytes, `targets` feeds them to the product and knows what may come of it, `guard` refuses harm,
`inputs` are the whole ones that the damaged ones are made from.
"""
