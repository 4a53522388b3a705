"""Finds what is missing in a record: parts of the journal that were cut, and facts that could not be seen. In: records.
Out: clauses for reasons, so that missing data never looks like a good result."""
