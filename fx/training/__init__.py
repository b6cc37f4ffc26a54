"""Operators that behave differently in training and in evaluation."""
