"""The version of pt2mx: `pyproject.toml` reads it here, and files that pt2mx writes hold it."""

__version__ = "0.2.0"
