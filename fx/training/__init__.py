"""Operators that compute otherwise while a model trains, and what they are in evaluation."""
