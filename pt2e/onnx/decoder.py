"""The decoder of a language model as a graph without a cache that it writes: keys and values in, longer ones out.

One graph reads prompts, with a past of no tokens, and single tokens. Its inputs and outputs have the names of
onnxruntime-genai.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import storage_of
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import args_of, tensor_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_values, move_to_device, storages_of
from pt2mx.pt2e.language.arguments import LONGEST_TEXT
from pt2mx.pt2e.language.signature import free_inputs, set_inputs
from pt2mx.pt2e.language.tensor_parallel import is_shard
from pt2mx.pt2e.onnx.files import rename_dims

if TYPE_CHECKING:
    from onnx import ModelProto

aten = torch.ops.aten

_SIZE = aten.sym_size.int
_HALF = (torch.bfloat16, torch.float16)
#: keys and values, in the order of a layer: kind of the cache -> the last part of a name
_PARTS = {"keys": "key", "values": "value"}
#: the dynamic dimensions of inputs and outputs, and their names
_DIMS: dict[str, dict[int, str]] = {
    "input_ids": {0: "batch_size", 1: "sequence_length"},
    "attention_mask": {0: "batch_size", 1: "total_sequence_length"},
    "past_key_values": {0: "batch_size", 2: "past_sequence_length"},
    "logits": {0: "batch_size", 1: "sequence_length"},
    "present": {0: "batch_size", 2: "total_sequence_length"},
}
#: the sizes of the example inputs; no two are equal, also not the sum of length and past
_BATCH, _LENGTH, _PAST = 2, 3, 4


class Decoder(NamedTuple):
    """A graph, its example inputs with their dynamic dimensions, the names of its inputs and outputs in a file, and the
    number of tokens that a text may have (None: any)."""

    graph: GraphModule
    example: dict[str, Any]
    shapes: dict[str, Any]
    inputs: list[str]
    outputs: list[str]
    longest: int | None

    def name_dims(self, model: ModelProto) -> None:
        """Give the dynamic dimensions of an exported model the names of onnxruntime-genai."""
        named = (*model.graph.input, *model.graph.output)
        names: dict[str, str] = {}
        for value in named:
            for i, name in _DIMS[value.name.partition(".")[0]].items():
                names[value.type.tensor_type.shape.dim[i].dim_param] = name
        rename_dims(model, lambda text: names.get(text, text))


def decoder_of(model: Any) -> Decoder:
    """Return the decoder of a `LanguageModel`, which does not change, with keys and values of the past as inputs.

    | | B sequences, S tokens, P of the past |
    |---|---|
    | `input_ids` | (B, S) int64 |
    | `attention_mask` | (B, P + S) int64, zero at padding, on the left |
    | `past_key_values.{i}.key`, `.value` | (B, heads, P, width) of layer i |
    | `logits` | (B, S, vocabulary) |
    | `present.{i}.key`, `.value` | (B, heads, P + S, width) |

    It is on the CPU and computes in float32, because onnxruntime has few kernels for bfloat16. A text longer than the
    program has frequencies of RoPE for is an error of the runtime.
    """
    _check(model)
    graph = move_to_device(copy_sharing_tensors(model.program.module(check_guards=False)), "cpu")
    _compute_in_float32(graph)
    longest = getattr(model.config, LONGEST_TEXT, None)
    _return_the_cache(graph, longest)
    past, names = [], []
    for i, layer in enumerate(model.layers):
        past.append([torch.zeros(_BATCH, layer[kind].shape[1], _PAST, layer[kind].shape[3]) for kind in _PARTS])
        names += [f"{i}.{part}" for part in _PARTS.values()]
    example = {
        "input_ids": torch.zeros(_BATCH, _LENGTH, dtype=torch.long),
        "attention_mask": torch.ones(_BATCH, _PAST + _LENGTH, dtype=torch.long),
        "past_key_values": past,
    }
    dynamic = {name: dict.fromkeys(_DIMS[name], Dim.DYNAMIC) for name in example}
    shapes = {**dynamic, "past_key_values": [[dynamic["past_key_values"]] * len(_PARTS)] * len(past)}
    inputs = ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)]
    outputs = ["logits", *(f"present.{name}" for name in names)]
    return Decoder(graph, example, shapes, inputs, outputs, longest)


def _check(model: Any) -> None:
    kinds = set().union(*model.layers)
    hint = "`pt2mx quantize --output NAME.pt2` writes a program without a cache, which export-onnx takes"
    if model.encoder is not None or model._images is not None:
        raise MXError(
            "the model reads more than tokens, and a decoder in an ONNX file reads those alone: quantize the text of a "
            f'vision-language model with part="language_model"; {hint}'
        )
    if others := sorted(kinds - set(_PARTS)):
        raise MXError(
            f"layers of the model keep {' and '.join(others)}, and a decoder in an ONNX file keeps keys and values of "
            f"its tokens alone: {hint}"
        )
    if any(isinstance(one, list) for layer in model.layers for one in layer.values()):
        raise MXError("the cache is quantized, and ONNX has no node for its codes: quantize without kv_cache")
    if is_shard(model.program):
        raise MXError("the model is divided among ranks: quantize it without --tensor-parallel")


def _compute_in_float32(model: GraphModule) -> None:
    """Make all tensors of 16 bits float32, but the scales of weights. Changes `model`."""
    packed = set()
    for each in graph_modules(model):
        for node in each.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
            packed |= {storage_of(tensor_of(each, n)) for n in node.all_input_nodes if n.op == "get_attr"}

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype in _HALF else value
        return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value

    map_values(model, widened, storages_of(model) - packed)


def _return_the_cache(model: GraphModule, longest: int | None) -> None:
    """Replace writes to the cache by outputs, and compute the inputs that the mask and the past imply.

    The model changes. A text may have `longest` tokens; None: any number.
    """
    graph, named = model.graph, free_inputs(model)
    past = [list(layer) for layer in zip(*(named[kind] for kind in _PARTS), strict=True)]
    inputs = {**{name: named[name] for name in ("input_ids", "attention_mask")}, "past_key_values": past}
    tensors, last = pytree.tree_leaves(past), graph.find_nodes(op="placeholder")[-1]
    for node in pytree.tree_leaves(inputs):  # in the order of the new signature
        last.append(node)
        last = node
    logits: Any = graph.output_node().args[0]
    outputs = [*logits, *(_concatenate(one, inputs["attention_mask"]) for one in tensors)]
    with graph.inserting_before(last.next):
        _compute_inputs(graph, named, tensors, longest)
    graph.output_node().args = (outputs,)
    codegen = graph._codegen
    _, out_spec = pytree.tree_flatten(outputs)
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=out_spec)  # type: ignore[attr-defined]
    set_inputs(model, inputs)


def _compute_inputs(graph: Graph, named: dict[str, Any], past: list[Node], longest: int | None) -> None:
    """Replace the inputs that the mask and the past imply, by nodes at the current position."""
    call, tokens, mask = graph.call_function, named["input_ids"], named["attention_mask"]
    length, filled, slots = call(_SIZE, (tokens, 1)), call(_SIZE, (past[0], 2)), call(_SIZE, (mask, 1))
    batch = call(_SIZE, (tokens, 0))
    equal = [(batch, call(_SIZE, (one, 0))) for one in (mask, *past)]
    equal += [(filled, call(_SIZE, (one, 2))) for one in past[1:]]
    for pair in (*equal, (slots, call(operator.add, (filled, length)))):
        call(torch._check, (call(operator.eq, pair),))
    numbers = call(aten.clamp.default, (call(aten.sub.Tensor, (call(aten.cumsum.default, (mask, 1)), 1)), 0))
    if longest is not None:  # a lookup of the number itself, which is an error beyond the end
        numbers = call(aten.index.Tensor, (call(aten.arange.default, (longest,)), [numbers]))
    computed = {
        "position_ids": call(aten.slice.Tensor, (numbers, 1, filled)),
        "start": call(aten.full.default, ([1], filled), {"dtype": torch.int64}),
        "logits_to_keep": call(aten.arange.default, (length,)),
    }
    for name, value in computed.items():
        named[name].replace_all_uses_with(value)
        graph.erase_node(named[name])


def _concatenate(past: Node, mask: Node) -> Node:
    """Replace the write of new keys, or values, into the cache by their concatenation with the past; return it."""
    (write,) = (node for node in past.users if node.target is aten.index_copy_.default)
    for size in [node for node in past.users if node.target is _SIZE and node.args[1] == 2]:
        size.args = mask, 1  # the number of slots
    with past.graph.inserting_before(write):
        present = past.graph.call_function(aten.cat.default, ([past, args_of(write)[3]], 2))
    write.replace_all_uses_with(present)
    past.graph.erase_node(write)
    return present
