"""Accuracy of MX formats by this project and by its peers, on the same model, calibration and held-out text."""
