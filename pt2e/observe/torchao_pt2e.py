"""Every import of torchao's PT2E machinery, and of private torch, that the flow uses.

torchao inserts and removes the observers; callers work around its treatment of unknown operators. Its import logs CUDA
extensions that a CPU machine lacks; the user does not see that.
"""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_manager import PassManager

from pt2mx.extras import without_log_warnings
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.convolution import LAYERS, BatchNorm, Convolution, normalizes_outputs
from pt2mx.fx.graph.node import args_of, free_name, make_positional, name_of, named_args, node_arg, tensor_of, value_of
from pt2mx.fx.graph.source_node import inherit_source

with without_log_warnings():
    import torchao
    from torch.ao.quantization.fx import utils as torch_fx_utils
    from torchao.quantization.pt2e import (
        FakeQuantize,
        FakeQuantizeBase,
        HistogramObserver,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
        fake_quantize,
    )
    from torchao.quantization.pt2e.convert import _convert_to_reference_decomposed_fx
    from torchao.quantization.pt2e.prepare import prepare as insert_modules
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint
    from torchao.quantization.pt2e.quantizer import (
        DuplicateDQPass,
        OperatorConfig,
        PortNodeMetaForQDQ,
        QuantizationAnnotation,
        QuantizationSpec,
        QuantizationSpecBase,
        Quantizer,
        SharedQuantizationSpec,
        annotate_input_qspec_map,
        annotate_output_qspec,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_, _fuse_linear_bn_, _get_node_name_to_scope

#: names of torch and torchao that are imported from here
__all__ = [
    "Q_ANNOTATION_KEY",
    "FakeQuantize",
    "FakeQuantizeBase",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "ObserverBase",
    "OperatorConfig",
    "PerChannelMinMaxObserver",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "QuantizationSpecBase",
    "Quantizer",
    "SharedQuantizationSpec",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "fake_quantize",
    "is_batchedtensor",
    "is_fake",
]

aten = torch.ops.aten

#: the batch norms that torchao folds
_BATCH_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)
#: meta key by which torchao recognizes a prepared model
_PREPARED_KEY = "_observed_graph_module_attrs"


def fold_batch_norms(model: GraphModule) -> None:
    """Fold the batch norms of a model in evaluation into the layers before them, where that changes no output, and
    record each layer as the source of the result of its norm."""
    norms = [node for node in model.graph.nodes if node.op == "call_function" and node.target in _BATCH_NORMS]
    _hide_others(model, norms)
    layers = {norm: BatchNorm.of(norm).x for norm in norms}
    for norm, layer in layers.items():
        if layer.target in LAYERS:
            _name_bias(model, layer, norm)
    _fuse_conv_bn_(model)
    _fuse_linear_bn_(model)
    left = set(model.graph.nodes)
    for norm, layer in layers.items():
        if norm not in left:
            inherit_source(layer, norm)


def _hide_others(model: GraphModule, norms: list[Node]) -> None:
    """Put an `alias` before each batch norm that must not be folded: its producer, or the producer's weight, has other
    users; it normalizes another dimension than the producer's outputs; it has no running statistics; it follows a
    transposed convolution in groups; a tensor of the norm or the layer is computed, or written by the graph.

    torchao checks none of this. The alias hides such norms from it.
    """
    if not norms:
        return
    user_counts: Counter[str] = Counter()
    for node in model.graph.find_nodes(op="get_attr"):
        user_counts[name_of(node)] += len(node.users)
    written = written_nodes(model.graph)
    for norm in norms:
        producer = BatchNorm.of(norm).x
        if producer.target in LAYERS and not _can_be_folded(producer, norm, user_counts, written):
            with model.graph.inserting_before(norm):
                alias = model.graph.call_function(aten.alias.default, (producer,))
            alias.meta.update(producer.meta)
            norm.replace_input_with(producer, alias)


def _can_be_folded(layer: Node, norm: Node, user_counts: Counter[str], written: set[Node]) -> bool:
    """Return whether folding the batch norm changes no output of the model."""
    _, weight, bias, *_ = named_args(layer).values()
    weights = [n for n in layer.all_input_nodes if n.op == "get_attr"]
    if len(layer.users) > 1 or any(user_counts[name_of(n)] > 1 for n in weights):
        return False
    tensors = [n for n in (weight, bias, *BatchNorm.of(norm)[1:]) if isinstance(n, Node)]
    if any(n.op != "get_attr" or n in written for n in tensors):
        return False
    convolution = Convolution.of(layer)
    if convolution is not None and convolution.transposed and convolution.groups > 1:
        return False
    return normalizes_outputs(layer, norm)


def _name_bias(model: GraphModule, layer: Node, norm: Node) -> None:
    """Give a layer without a bias one of zeros, under a free name, if another tensor has the name that torchao gives to
    the bias of a folded batch norm: torchao would overwrite that tensor."""
    make_positional(layer, 3)
    args = args_of(layer)
    path, _, attribute = f"{name_of(node_arg(layer, 1))}_bias".rpartition(".")
    owner = model.get_submodule(path)
    mean = BatchNorm.of(norm).mean
    if args[2] is not None or mean is None or not hasattr(owner, attribute):
        return
    name = free_name(owner, attribute)
    owner.register_parameter(name, nn.Parameter(torch.zeros_like(tensor_of(model, mean))))
    with model.graph.inserting_before(layer):
        bias = model.graph.get_attr(f"{path}.{name}" if path else name)
    bias.meta["val"] = value_of(mean)
    layer.args = (*args[:2], bias, *args[3:])


def annotate(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Call a quantizer as torchao's prepare does."""
    model = quantizer.transform_for_annotation(model)
    quantizer.annotate(model)
    quantizer.validate(model)
    return model


def insert_observers(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Insert the modules that the annotations of a graph ask for."""
    scopes, callback = _get_node_name_to_scope(model), quantizer.prepare_obs_or_fq_callback
    return insert_modules(model, scopes, is_qat=False, obs_or_fq_callback=callback)


def convert_modules(model: GraphModule) -> GraphModule:
    """Replace the modules of a prepared graph by operators."""
    _annotate_own_nodes(model)
    model = _convert_to_reference_decomposed_fx(model)
    if _holds_other_operators(model):
        for quantization_pass in (DuplicateDQPass(), PortNodeMetaForQDQ()):
            model = PassManager([quantization_pass])(model).graph_module
        _call_overloads(model)
    return model


def _annotate_own_nodes(model: GraphModule) -> None:
    """Point the annotations of a copied graph to its own nodes instead of the original's; names are equal in both.
    torchao's passes look for the operators around these nodes."""
    copies = {node.name: node for node in model.graph.nodes}
    for node in model.graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None:
            specs = {copies.get(read.name, read): spec for read, spec in annotation.input_qspec_map.items()}
            node.meta[Q_ANNOTATION_KEY] = replace(annotation, input_qspec_map=specs)


def _call_overloads(model: GraphModule) -> None:
    """Call the overload of an operator where torchao's affine observers call the packet: only an overload has a
    schema."""
    for node in model.graph.nodes:
        if isinstance(node.target, OpOverloadPacket) and len(node.target.overloads()) == 1:
            node.target = getattr(node.target, *node.target.overloads())
    model.recompile()


def _holds_other_operators(model: GraphModule) -> bool:
    return any(_quant_node_constraint(node) for node in model.graph.nodes)


def is_prepared(model: object) -> bool:
    """Return True for a prepared model."""
    return _PREPARED_KEY in getattr(model, "meta", {})


def forget_prepared(model: GraphModule) -> None:
    """Remove the mark of a prepared model, which torchao's convert leaves."""
    model.meta.pop(_PREPARED_KEY, None)


def forget_models() -> None:
    """Clear the caches of torch and torchao that would keep every prepared model alive."""
    for function in (
        torchao.utils._assert_and_get_unique_device,
        torch_fx_utils.assert_and_get_unique_device,
    ):
        function.cache_clear()
