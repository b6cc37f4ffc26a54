"""Memory and time of `pt2mx quantize` for a language model, from its checkpoint to its folder.

    python -m tests.benchmarks.memory [--shape 1b] [--layers N] [--recipe mxfp4_weight_only]
        [--checkpoint FOLDER] [--device cuda]

A Llama of the shape of 3.2 1B or 3.1 8B, random weights in bfloat16, written to a temporary folder; the command runs
in a process of its own, without calibration. The most memory that it had resident, over the bytes of the checkpoint;
on a GPU the most that torch's allocator had there.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.language import SHAPES, llama
from tests.benchmarks.measure import hardware

#: runs the command in a process that says last what its GPU's allocator had at most
_COMMAND = """
import sys, torch
from pt2mx.pt2e.cli.command import main
main(sys.argv[1:])
print(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="of the model, for a shorter run")
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--checkpoint", help="one that is there, in place of a random one")
    parser.add_argument("--device", default="cpu", help="where it is quantized; default: cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(options.checkpoint or folder) if options.checkpoint else Path(folder) / "checkpoint"
        if not options.checkpoint:
            llama(options.shape, options.layers, options.device).save_pretrained(source)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = ["quantize", "--model", f"hf:{source}", "--recipe", options.recipe, "--calibration", "none"]
        command += ["--device", options.device]
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *command, "--output", f"{folder}/quantized"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begin
        peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        *_, last, on_gpu = done.stdout.splitlines()
        print(last)
        print(f"checkpoint {size / 1e9:.2f} GB, {seconds:.0f} s, peak {peak / 1e9:.2f} GB on the host", end="")
        print(f", {(peak - 1e9) / size:.2f} times the checkpoint and 1 GB", end="")
        print(f", {int(on_gpu) / 1e9:.2f} GB on the GPU" if int(on_gpu) else "")
        print(hardware())


if __name__ == "__main__":
    main()
