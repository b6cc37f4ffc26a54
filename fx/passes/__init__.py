"""The passes of the lowering, one per file."""
