"""Graph passes: nodes in, nodes out. They know operators, not policies."""
