"""Queries that passes make on a graph: its nodes, constants, memory and subgraphs."""
