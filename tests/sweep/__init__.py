"""Many architectures through the whole flow; `python -m tests.sweep` prints what became of each."""
