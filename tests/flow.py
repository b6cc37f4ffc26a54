"""Steps of the flow, for tests of their results."""

import io
import re
import warnings
import zipfile
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.fx import lower

#: a process without pt2mx: prints for each NAME whether NAME.pt2 gives what NAME.pt says
WITHOUT_PT2MX = """
import sys
sys.modules["pt2mx"] = None  # an import of it fails
import torch
for name in sys.argv[1:]:
    x, want = torch.load(f"{name}.pt")
    with torch.no_grad():
        print(torch.equal(torch.export.load(f"{name}.pt2").module()(x), want))
"""


def exported(model: nn.Module, *inputs: object, **options) -> GraphModule:
    """Return the graph of a model in its current mode."""
    return torch.export.export(model, inputs, **options).module()


def calibrated(
    graph: GraphModule, quantizer: MXQuantizer, *inputs: object, prepare=pt2mx.prepare_pt2e, **named: object
) -> GraphModule:
    """Return the prepared model after one batch."""
    prepared = prepare(graph, quantizer)
    with torch.no_grad():
        prepared(*inputs, **named)
    return prepared


def prepare(model: nn.Module, inputs: tuple, config: MXQuantizationConfig) -> GraphModule:
    """Export a model in evaluation mode, prepare it with one config for all operators, and run one batch."""
    with torch.no_grad():
        graph = exported(model.eval(), *inputs)
    return calibrated(graph, MXQuantizer().set_global(config), *inputs)


def convert(
    model: nn.Module,
    inputs: tuple,
    quantizer: str | MXQuantizer = "mxfp8",
    fold: bool = True,
    shapes: object = None,
) -> GraphModule:
    """Export a model in evaluation mode, prepare it with a quantizer or a recipe of that name, and convert it
    uncalibrated."""
    quantizer = MXQuantizer.from_recipe(quantizer) if isinstance(quantizer, str) else quantizer
    with torch.no_grad():
        graph = exported(model.eval(), *inputs, dynamic_shapes=shapes)
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, quantizer), fold_quantize=fold)


def lowered_without(graph_pass: Callable, converted: GraphModule, **options) -> GraphModule:
    """Lower a converted model without a pass."""
    steps = [step for step in lower.PASSES if step.graph_pass is not graph_pass]
    with mock.patch.object(lower, "PASSES", steps):
        return pt2mx.lower_to_inductor(converted, **options)


def train(
    model: nn.Module,
    *inputs: object,
    steps: int,
    lr: float = 1e-2,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    target: float | torch.Tensor = 0.0,
) -> list[float]:
    """Train a model on one batch; return the loss of each step, the mean of the squared distances to the target."""
    update, losses = optimizer(model.parameters(), lr), []
    for _ in range(steps):
        update.zero_grad()
        loss = (model(*inputs) - target).square().mean()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def assert_converts_to_the_bit(prepared: GraphModule, *inputs: object) -> GraphModule:
    """Convert a prepared model, and check that it has the outputs of the prepared one in evaluation mode."""
    converted = pt2mx.convert_pt2e(prepared)
    with torch.no_grad():
        assert torch.equal(converted(*inputs), prepared.eval()(*inputs))
    return converted


def saved(program: ExportedProgram) -> io.BytesIO:
    """Return the file of a program."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found in the group")  # torch.export.save, of views
        torch.export.save(program, file)
    file.seek(0)
    return file


def saved_bytes(program: ExportedProgram) -> int:
    """Return the bytes of the tensors in the file of a program."""
    return bytes_of_tensors(saved(program))


def bytes_of_tensors(file: io.BytesIO) -> int:
    with zipfile.ZipFile(file) as archive:
        records = [one for one in archive.infolist() if re.search("/(weights|constants)/", one.filename)]
    return sum(record.file_size for record in records if not record.filename.endswith(".json"))


def unused_bytes(program: ExportedProgram) -> int:
    """Return the bytes of the unused tensors of a program, such as the batch counter of a batch norm."""
    unused = {node.name for node in program.graph.nodes if not node.users}
    tensors = program.state_dict | program.constants
    bytes_of, read = {}, set()
    for one in program.graph_signature.input_specs:
        if isinstance(tensor := tensors.get(one.target), torch.Tensor):
            storage = tensor.untyped_storage()
            bytes_of[storage.data_ptr()] = storage.nbytes()
            if one.arg.name not in unused:
                read.add(storage.data_ptr())
    return sum(size for start, size in bytes_of.items() if start not in read)


def reloaded(program: ExportedProgram) -> ExportedProgram:
    """Save and load a program."""
    return torch.export.load(saved(program))


def described(program):
    """Return the nodes of a program: target, number of inputs, dtype, shape and strides."""
    rows = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        layout = (value.dtype, *value.shape, *value.stride()) if isinstance(value, torch.Tensor) else ()
        target = node.target if node.op == "call_function" else node.op
        rows.append(f"{target} {len(node.all_input_nodes)} {[str(size) for size in layout]}")
    return sorted(rows)
