"""`slice_program`: re-quantize the packed weights of a program to a narrower recipe, without data.

"Slicing" is the word of Matryoshka Quantization (Nair et al., 2025) and of MF-QAT (Xu et al., 2026), whose "anchor" is
the format of the file. The new codes are those of the anchor's values: `quantize_mx(dequantize_mx(anchor), narrow)`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.passes.undo_quantization import DecodedWeight, restore_codes, undo_quantization
from pt2mx.pt2e.flow.anchors import check_narrower, observed_weights
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.packed_weights import PACKED_MATMULS, converted_graph
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.flow.weights import carry_notes
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY
from pt2mx.pt2e.program.sizes import dynamic_shapes
from pt2mx.pt2e.quantizer.annotate import REASON_KEY, REMARK_KEY
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: meta keys under which a graph that was not loaded keeps the settings of its own recipe
_OF_RECIPE = (Q_ANNOTATION_KEY, CONFIG_KEY, REASON_KEY, REMARK_KEY)


def forget_recipe(model: GraphModule) -> None:
    """Remove the settings of the recipe that a graph was quantized with from its meta."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            for key in _OF_RECIPE:
                node.meta.pop(key, None)


def slice_program(program: ExportedProgram, quantizer: MXQuantizer) -> ExportedProgram:
    """Re-quantize the packed weights of a program to a narrower recipe, without data.

    A weight gets the codes and scales of `quantize_mx(dequantize_mx(codes, scales), narrow spec)`, to the bit. One that
    the recipe leaves in high precision keeps its codes. Activations are quantized exactly where the recipe says so. The
    recipe's algorithms do not run: they need data.

    Args:
        program: a result of `load_program`, or `torch.export.export(converted, ...)`; not lowered. It does not change.
        quantizer: the recipe. Its weights have at most as many bits as those of the program, and blocks of equal size.

    Returns:
        The program for the recipe, with the inputs and outputs of the other.

    Raises:
        MXError: for another object, and one that holds no packed weights; for a recipe with wider weights, with other
            blocks, or with static tensor scales, which need data; and for one that selects no packed weight.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxint8"))
        >>> program = torch.export.export(pt2mx.convert_pt2e(prepared), (x,))
        >>> narrow = pt2mx.slice_program(program, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> for weight in (*pt2mx.packed_weights(program), *pt2mx.packed_weights(narrow)):
        ...     print(weight.name, weight.spec.element.name, tuple(weight.codes.shape))
        weight int8 (8, 64)
        weight fp4_e2m1 (8, 32)
    """
    if not isinstance(program, ExportedProgram):
        raise MXError(f"expected an ExportedProgram, not {type(program).__name__}: pass what load_program returned")
    if program.example_inputs is None:
        raise MXError("the program holds no example inputs: export it again and save it whole")
    graph = converted_graph(program)
    shapes = dynamic_shapes(program, graph)
    converted = slice_graph(graph, quantizer)
    args, kwargs = program.example_inputs
    with torch.no_grad():
        sliced = torch.export.export(converted, args, kwargs, dynamic_shapes=shapes)
    carry_notes(converted, sliced.graph_module)
    return sliced


def slice_graph(graph: GraphModule, quantizer: MXQuantizer) -> GraphModule:
    """Return the converted graph for a narrower recipe, as `slice_program` does; `graph` does not change."""
    graph = copy_sharing_tensors(graph)  # the program shares its subgraphs
    for module in graph_modules(graph):
        for node in module.graph.nodes:
            if node.target in PACKED_MATMULS or node.target is ops.fake_quantize_mx:
                raise MXError("the program is lowered: slice the one that it was lowered from, then lower the result")
    forget_recipe(graph)
    anchors = undo_quantization(graph)
    if not anchors:
        raise MXError("the program holds no packed weights: quantize the model with an 8-bit recipe, such as mxint8")
    prepared = prepare_pt2e(graph, quantizer)
    _check_recipe(prepared, anchors)
    converted = convert_pt2e(prepared)
    restore_codes(converted, anchors)
    return converted


def _check_recipe(prepared: GraphModule, anchors: Mapping[str, DecodedWeight]) -> None:
    """Raise an MXError unless the formats of a prepared model can be sliced from the anchors."""
    sliced = False
    for observer, names in observed_weights(prepared):
        for name in names & anchors.keys():
            check_narrower(name, observer.spec, anchors[name].spec)
            sliced = True
    if not sliced:
        raise MXError("the recipe selects no packed weight of the program: no weight would change")
    if any(isinstance(module, MXObserver) and module.static_scale is not None for module in prepared.modules()):
        raise MXError("static tensor scales need calibration: give the recipe tensor_scale: dynamic")
