"""The newest versions of neighbouring packages, each in an environment of its own; `python -m tests.neighbours`."""
