"""Finds what is missing in a record: parts of the journal that were cut, and facts that could not be seen. In: records.
Out: half-sentences that say what is missing, for the reason of a finding: missing data must never look like a good
result."""
