"""Memory and time of `pt2mx convert-checkpoint`, from a float checkpoint to a quantized one.

    python -m tests.benchmarks.checkpoint [--shape 3b] [--layers N] [--shard-gb 2] [--recipe mxfp4_weight_only]
        [--layout compressed-tensors] [--jobs 1]

A Llama of one of the shapes of `language.py` with an untied head and random weights in bfloat16, written to a temporary
folder in shards. The command runs in a separate process. The benchmark prints the peak resident memory next to the size
of the largest shard, and the time next to the time of copying the files.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.models.checkpoint_files import INDEX
from pt2mx.pt2e.models.safetensors_shards import SLICE, Entry, ShardWriter
from tests.benchmarks.language import SHAPES, config_of
from tests.benchmarks.measure import hardware, timed


def write_checkpoint(folder: Path, shape: str, layers: int | None, shard_bytes: float) -> None:
    """Write random weights, some rows at a time."""
    transformers = import_extra("transformers", "hf")
    config = config_of(shape, layers, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    shards: list[dict[str, Entry]] = [{}]
    for name, tensor in state.items():
        entry = Entry(torch.bfloat16, tuple(tensor.shape))
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + entry.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = entry
    noise, weight_map = torch.randn(SLICE // 2).mul_(0.02).bfloat16(), {}
    for number, entries in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map.update(dict.fromkeys(entries, file_name))
        with whole_file(folder / file_name) as file:
            writer = ShardWriter(file, entries, {"format": "pt"})
            for name, entry in entries.items():
                step = len(noise) * 2 // entry.row_bytes
                for first in range(0, entry.rows, step):
                    rows = min(step, entry.rows - first)
                    values = noise[: rows * entry.row_bytes // 2]
                    writer.write(name, first, values.view(rows, *entry.shape[1:]))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--layers", type=int, help="of the model, for a shorter run")
    parser.add_argument("--shard-gb", type=float, default=2, help="bytes of a shard, in GB")
    parser.add_argument("--recipe", default="mxfp4_weight_only")
    parser.add_argument("--layout", default="compressed-tensors")
    parser.add_argument("--jobs", default="1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, output, copy = (Path(folder) / name for name in ("float", "quantized", "copy"))
        source.mkdir()
        write_checkpoint(source, options.shape, options.layers, options.shard_gb * 1e9)
        sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
        copying = timed(lambda: shutil.copytree(source, copy))
        shutil.rmtree(copy)
        command = ["convert-checkpoint", str(source), str(output), "--recipe", options.recipe]
        command += ["--layout", options.layout, "--jobs", options.jobs]
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pt2mx", *command], check=True)
        seconds = time.perf_counter() - begin
        peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        written = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    print(f"float {sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards, the largest {max(sizes) / 1e9:.2f} GB")
    print(f"quantized {written / 1e9:.2f} GB, {written / sum(sizes):.3f} times the float checkpoint")
    print(f"{seconds:.0f} s (copying the float files: {copying:.0f} s), peak {peak / 1e9:.2f} GB")
    print(hardware())


if __name__ == "__main__":
    main()
