"""`prepare_pt2e` and `prepare_qat_pt2e`: torchao's insertion of observers, with the steps that it lacks for MX."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.errors import MXError, listed
from pt2mx.fx.graph.constants import constant_nodes, mark_constants
from pt2mx.fx.graph.higher_order_ops import graph_modules, hop_calls
from pt2mx.fx.graph.modes import has_effect
from pt2mx.fx.graph.node import Dequantize, attribute_of, name_of, parameter_of
from pt2mx.fx.graph.qdq import ROUNDED_KEY, holds_observers, is_portable
from pt2mx.fx.graph.tensors import copy_sharing_tensors, generate_code, tensors_in_written_memory
from pt2mx.fx.training.fuse_batch_norm import fuse_batch_norms
from pt2mx.fx.training.gradients import insert_quantized_gradients
from pt2mx.fx.training.train_eval import (
    TrainEvalModule,
    mark_followers,
    random_operators,
    to_train_eval_modules,
)
from pt2mx.pt2e.flow.accumulators import insert_accumulators
from pt2mx.pt2e.flow.anchors import set_anchors
from pt2mx.pt2e.flow.gradients import plan_gradients
from pt2mx.pt2e.flow.packed_weights import PACKED_MATMULS
from pt2mx.pt2e.flow.shared_scales import share_tensor_scales
from pt2mx.pt2e.flow.sizes import FLOAT_SIZE_KEY, float_size
from pt2mx.pt2e.observe import torchao_pt2e
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.observer import MXObserver, observed_value
from pt2mx.pt2e.observe.qspec import mx_spec
from pt2mx.pt2e.observe.range_observers import MXMinMaxObserver
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

#: the name that torch.export gives to tensors that are no attributes of a module
_LIFTED = "lifted_tensor_"
#: operators that copy a constant of `forward`, such as `torch.tensor(2.0)`, in an export and in a decomposed one
_COPIES = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.clone.default)
#: meta key of a model prepared for calibration: the values, at preparation, of the buffers that it writes
INITIAL_KEY = "mx_initial_buffers"


class PreparedModule(GraphModule):
    """A prepared graph; `train()` and `eval()` switch dropout, batch norm and the like, as in any module."""

    @property
    def _exported_training(self) -> bool:
        """torchao's `move_exported_model_to_train` and `..._to_eval` read and set this."""
        return self.training

    @_exported_training.setter
    def _exported_training(self, training: bool) -> None:
        self.train(training)


def prepare_pt2e(model: GraphModule, quantizer: torchao_pt2e.Quantizer) -> GraphModule:
    """Insert observers for post-training quantization.

    Args:
        model: `torch.export.export(...).module()` of a model in evaluation mode. Its graph does not change; the
            prepared model shares its parameters.
        quantizer: an `MXQuantizer`, a `ComposableQuantizer` of torchao that contains one, or a `Quantizer` of your own
            that annotates with `mx_qspec`.

    Returns:
        The prepared model, in evaluation mode. It computes in high precision and collects statistics; after
        `enable_fake_quant(model)` it computes like the converted model.

    Raises:
        MXError: for a model that is not an exported graph, is prepared or converted already, or spans several devices;
            for an object that is no quantizer, and an annotation that is no spec.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8"))
        >>> torch.equal(prepared(x), exported(x))  # in high precision, while it collects statistics
        True
    """
    return _prepare(model, quantizer, for_training=False)


def prepare_qat_pt2e(
    model: GraphModule, quantizer: torchao_pt2e.Quantizer, anchor: GraphModule | None = None
) -> GraphModule:
    """Insert fake quantization with a straight-through gradient, for training.

    A batch norm after a quantized convolution or linear layer is folded into the weight before the weight is quantized,
    in training and in evaluation; its statistics and parameters continue to train (`pt2mx.fx.training.fuse_batch_norm`,
    after Jacob et al. (2018), section 3.2). The model starts in the mode of the export, in training mode if the export
    does not show it; `train()` and `eval()` switch it. Static tensor scales follow the batches of training. A warning
    names weights that do not train: those that `optimize` stored as codes (NVFP4), and those that torch.export made
    constants (a Python list of parameters). Another warning names observers whose results would be lost:
    `MXFakeQuantize` replaces all but those of ranges without a word. A config's `gradient` quantizes what flows back
    into its operators; a warning names those whose gradients stay in high precision.

    Args:
        model: `torch.export.export(...).module()`, exported in training mode to train, in evaluation mode to keep
            batch norm and dropout frozen at first. The prepared model shares its parameters.
        quantizer: as in `prepare_pt2e`.
        anchor: a model that this function prepared from the same exported one, with wider weights. The weights are then
            those that `slice_program` makes of the converted anchor: quantized to its formats first. Both models train
            the same parameters; `distill` trains them together.

    Returns:
        The prepared model. Train it like any module, then convert it with `convert_pt2e`.

    Raises:
        MXError: as `prepare_pt2e`; for weights that are wider than the anchor's, have other blocks, or tensor scales.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8), (x,)).module()
        >>> qat = pt2mx.prepare_qat_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> optimizer = torch.optim.SGD(qat.parameters(), lr=0.01)
        >>> losses = []
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     losses.append(qat(x).square().sum())
        ...     losses[-1].backward()
        ...     optimizer.step()
        >>> bool(losses[-1] < losses[0])
        True
        >>> torch.equal(pt2mx.convert_pt2e(qat)(x), qat.eval()(x))
        True
    """
    prepared = _prepare(model, quantizer, for_training=True)
    if anchor is not None:
        if not isinstance(anchor, PreparedModule):
            raise MXError(f"anchor is a {type(anchor).__name__}: give what prepare_qat_pt2e returned")
        set_anchors(prepared, anchor)
    return prepared


def _prepare(model: GraphModule, quantizer: torchao_pt2e.Quantizer, for_training: bool) -> GraphModule:
    check_exported(model)
    check_quantizer(quantizer)
    model = to_annotate(model, for_training)
    if not isinstance(quantizer, MXQuantizer):
        generate_code(model)  # another library's quantizer may run the model
    meta = dict(model.meta)
    mark_constants(model)
    try:
        model = torchao_pt2e.annotate(model, quantizer)
        _check_annotations(model, quantizer)
        model = _insert_observers(model, quantizer, {})
    finally:
        torchao_pt2e.forget_models()
    graphs = graph_modules(model)
    training = to_train_eval_modules(model)
    by_mode = any(isinstance(module, TrainEvalModule) for module in model.modules())
    if training and not for_training:
        warnings.warn(
            f"the exported model runs {listed(training)} in training mode, the prepared and the converted one in "
            "evaluation mode, even where training is meant to stay (dropout that samples, batch statistics): "
            "export model.eval()",
            stacklevel=3,
        )
    if names := random_operators(model, bool(training)):
        warnings.warn(
            f"{listed(names)} of the exported model draw random numbers in evaluation and in the converted model too, "
            "because no argument of theirs sets the mode: if they belong to training (noise, a decomposed "
            "alpha_dropout), export model.eval()",
            stacklevel=3,
        )
    if for_training:
        _warn_of_codes(graphs)
        _warn_of_constants(model)
        _observers_to_fake_quantize(model)
        if names := plan_gradients(graphs):
            warnings.warn(
                f"{listed(names)} compute their gradients in high precision: gradient= is of linear layers, matmuls of "
                "two matrices, convolutions by blocks of one row, and attention without dropout",
                stacklevel=3,
            )
        for graph in graphs:
            fuse_batch_norms(graph, torchao_pt2e.FakeQuantizeBase)
    for graph in graphs:
        share_tensor_scales(graph)
        insert_quantized_gradients(graph, torchao_pt2e.FakeQuantizeBase)
        insert_accumulators(graph, for_training)
    prepared = generate_code(PreparedModule(model, model.graph))
    prepared.meta.update({**model.meta, **meta})
    if not for_training:
        prepared.meta[INITIAL_KEY] = {name: _kept(t) for name, t in tensors_in_written_memory(model).items()}
    return prepared.train(for_training and (bool(training) or not by_mode))


def to_annotate(model: GraphModule, for_training: bool = False) -> GraphModule:
    """Return a copy of an exported graph for quantizers to annotate: without dead code and, except for training, with
    batch norms folded into the layers before them. It shares the unchanged parameters, notes the size of `model`, and
    has no code until `generate_code`.
    """
    size = float_size(model)
    model = copy_sharing_tensors(model, delays_code=True)
    model.meta[FLOAT_SIZE_KEY] = size
    if for_training:
        mark_followers(model)
    for graph in graph_modules(model):
        graph.graph.eliminate_dead_code(has_effect)
    if not for_training:
        torchao_pt2e.fold_batch_norms(model)
    return model


def _kept(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in the memory of one value if all are equal: most caches are large and zero."""
    first = tensor.flatten()[:1].clone()
    uniform = tensor.numel() > 1 and bool((tensor == first).all())
    return first.expand(tensor.numel()).view(tensor.shape) if uniform else tensor.clone()


def _insert_observers(
    model: GraphModule, quantizer: torchao_pt2e.Quantizer, done: dict[GraphModule, GraphModule]
) -> GraphModule:
    """Insert the observers of a graph and its subgraphs, each once."""
    for call in list(hop_calls(model)):  # a list first: setattr below changes the subgraphs that names refer to
        for name, graph in call.graphs:
            if graph not in done:
                done[graph] = _insert_observers(graph, quantizer, done)
            setattr(model, name, done[graph])
    model = torchao_pt2e.insert_observers(model, quantizer)
    _configure_observers(model)  # moves them, too: torchao puts all on the device of the outer graph
    return model


def _configure_observers(graph: GraphModule) -> None:
    constants = constant_nodes(graph.graph)
    for node in graph.graph.find_nodes(op="call_module"):
        observer = graph.get_submodule(str(node.target))
        if isinstance(observer, torchao_pt2e.ObserverBase | torchao_pt2e.FakeQuantizeBase):
            value = node.meta["val"] = observed_value(node)
        if isinstance(observer, MXObserver):
            observer.observe_once = node.args[0] in constants
            if isinstance(value, Tensor):
                observer.to(value.device)


def check_quantizer(quantizer: object, kind: type = torchao_pt2e.Quantizer) -> None:
    """Raise an `MXError` for what is no quantizer of this kind."""
    if not isinstance(quantizer, kind):
        raise MXError(
            f"expected an MXQuantizer, not {type(quantizer).__name__}: "
            "make one with MXQuantizer.from_recipe(name) or MXQuantizer().set_global(config)"
        )


def _check_annotations(model: GraphModule, quantizer: torchao_pt2e.Quantizer) -> None:
    """Raise an MXError for an annotation that torchao would assert is none, such as an `MXSpec` by itself, and for an
    MX spec of a node that is no input, which torchao would leave in high precision."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            annotation = node.meta.get(torchao_pt2e.Q_ANNOTATION_KEY)
            if annotation is None:
                continue
            where = f"{type(quantizer).__name__} annotates {node.name} ({node.target})"
            if not isinstance(annotation, torchao_pt2e.QuantizationAnnotation):
                raise MXError(
                    f"{where} with {str(annotation)[:60]!r} of type {type(annotation).__name__}: the meta "
                    f"{torchao_pt2e.Q_ANNOTATION_KEY!r} is a QuantizationAnnotation(input_qspec_map, output_qspec)"
                )
            for key, spec in annotation.input_qspec_map.items():
                if mx_spec(spec) is not None and key not in node.all_input_nodes:
                    raise MXError(
                        f"{where} with a spec for {str(key)[:60]!r}, which is none of its inputs: the keys of "
                        f"input_qspec_map are nodes, here of {', '.join(n.name for n in node.all_input_nodes)}"
                    )
            for spec in (*annotation.input_qspec_map.values(), annotation.output_qspec):
                if spec is not None and not isinstance(spec, torchao_pt2e.QuantizationSpecBase):
                    raise MXError(
                        f"{where} with {str(spec)[:60]!r} of type {type(spec).__name__}: torchao takes a "
                        "QuantizationSpec, which pt2mx.mx_qspec(spec) makes of an MX spec"
                    )


def check_exported(model: object) -> None:
    """Raise an MXError unless the model is an exported float graph on one device."""
    if isinstance(model, torch.export.ExportedProgram):
        raise MXError("expected a graph module, not an ExportedProgram: pass exported_program.module()")
    if torchao_pt2e.is_prepared(model):
        raise MXError("the model is prepared already: calibrate or train it, then call convert_pt2e")
    if not isinstance(model, GraphModule) or not _is_exported(model):
        raise MXError(
            f"expected an exported graph, not {type(model).__name__}: "
            "pass torch.export.export(model, example_inputs).module()"
        )
    if any(_is_converted(node) for node in model.graph.nodes):
        raise MXError("the model is converted already: prepare the exported float model instead")
    if is_portable(model):
        raise MXError("the model belongs to a portable program, which is already converted: prepare the float model")
    if holds_observers(model.state_dict()):
        raise MXError("the model is an export of a prepared one: prepare the exported float model instead")
    devices = sorted({str(t.device) for t in [*model.parameters(), *model.buffers()]})
    if len(devices) > 1:
        raise MXError(
            f"the model spans the devices {', '.join(devices)}: move it to one device, or export and quantize the part "
            "on each device by itself"
        )


def _is_converted(node: Node) -> bool:
    """Return whether a node reads codes, of a converted or a lowered model; not of a weight that `optimize` rounded."""
    return (node.target is ops.dequantize_mx and ROUNDED_KEY not in node.meta) or node.target in PACKED_MATMULS


def _is_exported(model: GraphModule) -> bool:
    """Return True for a graph of operators: torch.fx.symbolic_trace gives calls of modules, methods and functions."""
    targets = []
    for node in model.graph.nodes:
        if node.op == "call_function":
            targets.append(node.target)
        elif node.op.startswith("call_") and node.target != "_guards_fn":
            return False
    operators = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    return not targets or any(isinstance(target, operators) for target in targets)


def _warn_of_codes(graphs: list[GraphModule]) -> None:
    """Warn of weights that `optimize` stored as codes, which have no gradient."""
    names = []
    for graph in graphs:
        for node in graph.graph.nodes:
            if ROUNDED_KEY in node.meta:
                names.append(parameter_of(name_of(Dequantize.expect(node).codes)))
    if names:
        warnings.warn(
            f"optimize stored {listed(names)} as codes, which training does not change: to train them, prepare the "
            "exported model that optimize was given",
            stacklevel=4,
        )


def _warn_of_constants(model: GraphModule) -> None:
    """Warn of constants that torch.export made of parameters of no module, such as those in a Python list."""
    names = []
    for node in model.graph.find_nodes(op="get_attr"):
        # a tensor without a name in the model that `forward` did not make either
        if _LIFTED not in name_of(node) or all(user.target in _COPIES for user in node.users):
            continue
        value = attribute_of(model, node)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
            names.append(f"{name_of(node)} {tuple(value.shape)}")
    if names:
        warnings.warn(
            f"{listed(names)} are constants of the exported model, which training does not change: torch.export makes "
            "them of tensors that belong to no module. If they are parameters in a Python list or dict, keep them in "
            "an nn.ParameterList or nn.ParameterDict, and layers in an nn.ModuleList, then export again",
            stacklevel=4,
        )


def _observers_to_fake_quantize(model: nn.Module) -> None:
    """Replace every `MXObserver` by an `MXFakeQuantize`, so that a config needs no flag for QAT. One observer may have
    several names. A warning names other subclasses, of which only the format stays."""
    replacements: dict[MXObserver, MXFakeQuantize] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, MXObserver) and not isinstance(module, MXFakeQuantize):
            if module not in replacements:
                device = module.values.device
                replacements[module] = MXFakeQuantize(module.qscheme).to(device)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, replacements[module])
    # a range changes no number: configs of pt2-bfp and torch.ao name its observers for training, too
    others = [
        type(one) for one in replacements if type(one) is not MXObserver and not isinstance(one, MXMinMaxObserver)
    ]
    if names := sorted({kind.__name__ for kind in others}):
        warnings.warn(
            f"prepare_qat_pt2e inserts MXFakeQuantize instead of {listed(names)}, which observe calibration only: to "
            "observe, calibrate a model of prepare_pt2e; to train with a class of your own, derive it from "
            "MXFakeQuantize",
            stacklevel=4,
        )
