"""SGLang on checkpoints that `python -m tests.engines.vllm FOLDER --prepare` wrote, as rows of a table in Markdown.

    python tests/engines/in_sglang.py FOLDER/NAME...

A machine with SGLang and an NVIDIA GPU; pt2mx is not needed. Each checkpoint has a process of its own, since SGLang's
scheduler ends its parent where it fails. The distances are those of `tests/engines/vllm/results.md`.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

#: small, without graphs of CUDA; attention in Triton and sampling in torch, which need no other library
_OPTIONS = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "disable_flashinfer_autotune": True,
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "context_length": 256,
}
#: seconds for one checkpoint
_LIMIT = 180
Scores = list[list[float]]


def main() -> None:
    for place in map(Path, sys.argv[1:]):
        result = place / "sglang.json"
        result.unlink(missing_ok=True)  # of an earlier run
        said = _run(place)
        made = json.loads((place / "made.json").read_text())["reference"]
        if not result.exists():
            outcome = f"no: {_reason(said)} | |"
        elif made:
            noise = _distance(made["bfloat16"], made["float32"])
            outcome = f"yes | {_distance(json.loads(result.read_text()), made['float32']):.4f} | {noise:.4f}"
        else:  # transformers has other parameters
            outcome = "yes | |"
        print(f"| {place.name} | {outcome} |", flush=True)


def _run(place: Path) -> str:
    """Score the texts of a checkpoint in a process of its own; return what SGLang printed."""
    command = [sys.executable, __file__, "--score", str(place)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=_LIMIT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nTimeoutError: no result after {_LIMIT} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what SGLang started has ended
            os.killpg(process.pid, signal.SIGKILL)


def _score(place: Path) -> None:
    """Write the log-probability of each token of the texts but the first."""
    import sglang

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    engine = sglang.Engine(model_path=str(place / "checkpoint"), port=port, **_OPTIONS)
    sampling = {"temperature": 0, "max_new_tokens": 1}
    scores = []
    for text in json.loads((place / "made.json").read_text())["texts"]:
        output = engine.generate(input_ids=text, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
        scores.append([entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]])
    (place / "sglang.json").write_text(json.dumps(scores))
    engine.shutdown()


def _distance(one: Scores, other: Scores) -> float:
    """Return the mean absolute difference of log-probabilities."""
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return statistics.fmean(abs(a - b) for a, b in pairs)


def _reason(said: str) -> str:
    """Return the error that ended SGLang's scheduler."""
    errors = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception): .*$", said, re.MULTILINE)
    return errors[0] if errors else said.strip().rpartition("\n")[2]


if __name__ == "__main__":
    if sys.argv[1] == "--score":
        _score(Path(sys.argv[2]))
    else:
        main()
