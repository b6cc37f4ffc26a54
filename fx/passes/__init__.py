"""Graph passes, one a file."""
