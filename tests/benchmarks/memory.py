"""Memory and time of `pt2mx quantize` for a language model, from its checkpoint to its folder.

    python -m tests.benchmarks.memory [--shape 1b] [--layers N] [--recipe mxfp4_weight_only]
        [--checkpoint FOLDER] [--codes] [--device cuda]

A Llama of the shape of 3.2 1B or 3.1 8B, random weights in bfloat16, written to a temporary folder. The command runs in
a separate process, without calibration. The benchmark prints its peak resident memory over the bytes of the checkpoint,
and on a GPU the peak of torch's allocator. `--codes`: convert the checkpoint file by file first; the command then uses
its codes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
from tests.benchmarks.language import SHAPES, llama
from tests.benchmarks.measure import hardware

#: runs the command in a process that prints its peak resident memory at the end, and the peak of its GPU's allocator;
#: getrusage would include the parent's memory before the program began
_COMMAND = """
import re, sys, torch
from pathlib import Path
from pt2mx.pt2e.cli.command import main
main(sys.argv[1:])
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
print(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="of the model, for a shorter run")
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--checkpoint", help="one that is there, in place of a random one")
    parser.add_argument("--codes", action="store_true", help="measure how codes are loaded that are made file to file")
    parser.add_argument("--device", default="cpu", help="where it is quantized; default: cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(options.checkpoint or folder) if options.checkpoint else Path(folder) / "checkpoint"
        if not options.checkpoint:
            llama(options.shape, options.layers, options.device).save_pretrained(source)
        command = ["--recipe", options.recipe, "--calibration", "none", "--device", options.device]
        if options.codes:
            convert_checkpoint(source, f"{folder}/codes", options.recipe)
            source, command = Path(folder) / "codes", ["--device", options.device]
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = ["quantize", "--model", f"hf:{source}", "--output", f"{folder}/quantized", *command]
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *command],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begin
        *_, last, resident, on_gpu = done.stdout.splitlines()
        peak = int(resident)
        print(last)
        print(f"checkpoint {size / 1e9:.2f} GB, {seconds:.0f} s, peak {peak / 1e9:.2f} GB on the host", end="")
        print(f", {(peak - 1e9) / size:.2f} times the checkpoint and 1 GB", end="")
        print(f", {int(on_gpu) / 1e9:.2f} GB on the GPU" if int(on_gpu) else "")
        print(hardware())


if __name__ == "__main__":
    main()
