"""Implementations that `pt2mx conformance` scores: a module each, and their table."""
