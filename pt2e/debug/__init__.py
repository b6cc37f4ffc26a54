"""Print graphs, and find where two forms of a model diverge."""
