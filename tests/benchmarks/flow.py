"""prepare + convert over torch.export's own time, on Llama-shaped models of 4 to 32 layers (small widths).

    python -m tests.benchmarks.flow [--layers 4 8 16 32]

Reach: at most 1x, and linear in the number of layers.
"""

import argparse
import time

import torch

import pt2mx
from tests.benchmarks.measure import Row, report
from tests.language_models import tiny_decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    rows: list[Row] = []
    for layers in parser.parse_args().layers:
        program, export = timed(lambda layers=layers: export_llama(layers))
        quantizer = pt2mx.MXQuantizer.from_recipe("mxfp8")
        prepared, prepare = timed(lambda: pt2mx.prepare_pt2e(program.module(), quantizer))  # noqa: B023 - called at once
        converted, convert = timed(lambda: pt2mx.convert_pt2e(prepared))  # noqa: B023 - called at once
        row: Row = {"layers": layers, "operators": len(pt2mx.quantization_report(converted).operators)}
        row |= {"export s": export, "prepare s": prepare, "convert s": convert}
        rows.append(row | {"prepare + convert / export": (prepare + convert) / export})
    report(rows)


def export_llama(layers: int) -> torch.export.ExportedProgram:
    model = tiny_decoder("llama", num_hidden_layers=layers, use_cache=False)
    model.register_forward_hook(lambda module, inputs, output: output.to_tuple())
    with torch.no_grad():
        return torch.export.export(model, (torch.randint(256, (2, 32)),))


def timed(function):
    start = time.perf_counter()
    return function(), time.perf_counter() - start


if __name__ == "__main__":
    main()
