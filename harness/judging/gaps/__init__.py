"""What the record does not say, although it should, and how that is put into words. Pure."""
