"""Recorded results of nine peer libraries for the same inputs, and a manifest. For each result the manifest says where
it follows the specification, and in how many values it deviates."""

import json
from pathlib import Path

import numpy as np

GOLDEN = np.load(Path(__file__).with_name("pt2mx") / "golden.npz")
ENTRIES = json.loads(bytes(GOLDEN["manifest_json"]))["entries"]
#: pychop's results that follow the specification (blocks over the flattened array, int8 down to -128)
OF_PYCHOP = [entry for entry in ENTRIES if entry["lib"] == "pychop" and entry["expect"] == "exact"]
