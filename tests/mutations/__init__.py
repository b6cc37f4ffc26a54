"""Faults of one line, put into the product one after another, that the suite must find."""
