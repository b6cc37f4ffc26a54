"""prepare + convert over torch.export's own time, on Llama-shaped models of 4 to 32 layers (small widths).

    python -m tests.benchmarks.flow [--layers 4 8 16 32]

Reach: at most 1x, and linear in the number of layers.
"""

import argparse
import platform
import time

import torch

import pt2mx
from pt2mx.extras import import_extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    rows = [("layers", "operators", "export s", "prepare s", "convert s", "prepare + convert / export")]
    for layers in parser.parse_args().layers:
        program, export = timed(lambda layers=layers: export_llama(layers))
        quantizer = pt2mx.MXQuantizer.from_recipe("mxfp8")
        prepared, prepare = timed(lambda: pt2mx.prepare_pt2e(program.module(), quantizer))  # noqa: B023 - called at once
        converted, convert = timed(lambda: pt2mx.convert_pt2e(prepared))  # noqa: B023 - called at once
        operators = len(pt2mx.quantization_report(converted).operators)
        cells = (layers, operators, *(f"{t:.2f}" for t in (export, prepare, convert)))
        rows.append(tuple(map(str, (*cells, f"{(prepare + convert) / export:.2f}x"))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")


def export_llama(layers: int) -> torch.export.ExportedProgram:
    transformers = import_extra("transformers", "hf")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.register_forward_hook(lambda module, inputs, output: output.to_tuple())
    with torch.no_grad():
        return torch.export.export(model, (torch.randint(256, (2, 32)),))


def timed(function):
    start = time.perf_counter()
    return function(), time.perf_counter() - start


if __name__ == "__main__":
    main()
