"""What nine peer libraries gave for the same inputs: recorded arrays, and a manifest that says of each result where it
follows the specification, and in how many values it deviates."""

import json
from pathlib import Path

import numpy as np

GOLDEN = np.load(Path(__file__).with_name("pt2mx") / "golden.npz")
ENTRIES = json.loads(bytes(GOLDEN["manifest_json"]))["entries"]
#: of pychop, those that follow the specification (blocks over the flattened array, int8 down to -128)
OF_PYCHOP = [entry for entry in ENTRIES if entry["lib"] == "pychop" and entry["expect"] == "exact"]
