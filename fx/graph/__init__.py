"""The questions that passes ask of a graph: its nodes, constants, memory and subgraphs."""
