"""Looking into a model: its graph, and where two of its forms come apart."""
