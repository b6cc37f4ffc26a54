"""Weights of an exported graph, rounded by what calibration shows; the numbers are `pt2mx.algorithms`."""
