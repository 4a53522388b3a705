"""Finds missing data in a record: parts of the journal that were cut, and facts that could not be seen. Input: records.
Output: clauses that say what is missing, for the reason of a finding. Missing data must never look like a good
result."""
