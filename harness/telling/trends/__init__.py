"""Many runs: a store of their results, and the comparison of two sets of them."""
