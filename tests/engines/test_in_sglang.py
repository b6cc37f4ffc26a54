"""The script that runs SGLang, with a module in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engines import in_sglang

#: an engine that is .5 off in each log-probability, and refuses one checkpoint
SGLANG = """
from pathlib import Path

class Engine:
    def __init__(self, model_path, port, **options):
        if Path(model_path).parent.name == "refused":
            raise ImportError("no scheme")

    def generate(self, input_ids, sampling_params, return_logprob, logprob_start_len):
        scored = [(-1.5, token, None) for token in input_ids[1:]]
        return {"meta_info": {"input_token_logprobs": [(None, input_ids[0], None), *scored]}}

    def shutdown(self):
        pass
"""


def test_a_row_for_each_checkpoint(tmp_path):
    (tmp_path / "sglang.py").write_text(SGLANG)
    scores = {"float32": [[-1.0, -1.0]], "bfloat16": [[-1.0, -1.25]]}
    references = {"near": scores, "refused": scores, "other": {}}
    for name, reference in references.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "made.json").write_text(json.dumps({"texts": [[3, 1, 2]], "reference": reference}))
        (tmp_path / name / "sglang.json").write_text("of an earlier run")
    command = [sys.executable, Path(in_sglang.__file__), *(tmp_path / name for name in references)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "| near | yes | 0.5000 | 0.1250 |",
        "| refused | no: ImportError: no scheme | | |",
        "| other | yes | | |",
    ]
