"""`MXObserver`, the module that `prepare_pt2e` inserts."""

from __future__ import annotations

import warnings
from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.analysis.sums import QuantizationStatistics, quantization_sums
from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx, tensor_scale_mx
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.node import called_module, node_arg
from pt2mx.fx.graph.qdq import insert_quantize_dequantize
from pt2mx.fx.passes.fold_weights import compute_codes
from pt2mx.fx.training.fuse_batch_norm import ScaledWeight
from pt2mx.fx.training.train_eval import in_backward_pass
from pt2mx.pt2e.observe.flags import Switched
from pt2mx.pt2e.observe.qspec import CONFIG_KEY, spec_of_qscheme, ste_of_qscheme, tensor_scale_of_qscheme
from pt2mx.pt2e.observe.tensor_scales import TENSOR_SCALES, StaticTensorScale
from pt2mx.pt2e.observe.torchao_pt2e import ObserverBase, QuantizationSpec, is_fake
from pt2mx.spec import MXSpec

#: meta key of a `dequantize_mx` node: the observed `QuantizationStatistics` of its tensor
STATISTICS_KEY = "mx_statistics"
#: meta key of a weight: the `QuantizationStatistics` of its float values, which an algorithm has rounded
ROUNDING_KEY = "mx_rounding"
#: meta key of the call of an observer: further meta for its `dequantize_mx` node
NOTES_KEY = "mx_notes"
#: arguments that torchao passes to the constructor
_ANNOTATION = {field.name for field in fields(QuantizationSpec)}


class StatisticsCollector(nn.Module):
    """Add up `quantization_sums` of tensors. The sums are buffers: they move, copy, save and load with the model.

    Args:
        spec: the spec whose errors are counted.
    """

    tensors: Tensor  # and so on, a buffer for each of `_no_sums`
    values: Tensor

    def __init__(self, spec: MXSpec) -> None:
        nn.Module.__init__(self)  # not super(): an observer has other bases, whose initializers must not run
        self.spec = spec
        for name, value in _no_sums().items():
            self.register_buffer(name, value)

    @property
    def tensor_scale(self) -> Tensor | None:
        """The scale of a whole tensor, () float32; None: each tensor has its own, if the format has one."""
        return None

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Add a tensor to the sums.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.
        """
        for name, value in quantization_sums(x.detach(), self.spec, self.tensor_scale).items():
            getattr(self, name).add_(value)

    @property
    def statistics(self) -> QuantizationStatistics | None:
        """The statistics of all tensors so far; None before the first."""
        return QuantizationStatistics.from_sums({name: getattr(self, name) for name in _no_sums()})

    def reset_statistics(self) -> None:
        """Reset the statistics."""
        for name in _no_sums():
            getattr(self, name).zero_()


def _no_sums() -> dict[str, Tensor]:
    counts = ("tensors", "empty", "values", "nonfinite", "saturated", "flushed")
    sums = {name: torch.zeros((), dtype=torch.int64) for name in counts}
    # (1,), not 0-d: torch.compile takes a 0-d float64 CPU tensor for a Python number, and loses what is written to it
    sums |= {name: torch.zeros(1, dtype=torch.float64) for name in ("signal", "noise")}
    return {**sums, "exponents": torch.zeros(256, dtype=torch.int64)}


class MXObserver(StatisticsCollector, Switched, ObserverBase):
    """Collect the quantization errors of a tensor during calibration, and pass the tensor through.

    With `enable_fake_quant` it returns the quantized values instead, to evaluate a prepared model before conversion.
    The scales of blocks come from their values: the statistics change no output. Of what calibration sees, only the
    static scale of a whole tensor does (`pt2mx.pt2e.observe.tensor_scales`), of formats that have one.

    Args:
        qscheme: the spec, encoded by `pt2mx.pt2e.observe.qspec.mx_qscheme`; torchao passes it from the annotation.
        fake_quant: True to start with fake quantization.
        observe: True to start with the collection of statistics.
        annotation: the other fields of a torchao `QuantizationSpec`; ignored.

    Raises:
        MXError: for another argument. When it is called: if a static tensor scale is needed before the first batch, and
            inside `torch.cond` and the like while gradients are recorded, which torch traces without values.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.pt2e.observe.qspec import mx_qscheme
        >>> observer = pt2mx.MXObserver(mx_qscheme(pt2mx.MXSpec("mxfp4")))
        >>> observer(torch.tensor([1.0, 2.0, 3.3, 6.0]))
        tensor([1.0000, 2.0000, 3.3000, 6.0000])
        >>> round(observer.statistics.sqnr, 1)  # dB
        27.6
        >>> observer.enable_fake_quant()
        >>> observer(torch.tensor([1.0, 2.0, 3.3, 6.0]))
        tensor([1., 2., 3., 6.])
    """

    #: True if the last observer of a graph that is converted folds the weights: torchao's own `convert_pt2e` folds no
    #: weights of other libraries
    folds_weights = True
    #: True if a static tensor scale follows the batches of training
    follows_training = False
    _amax: Tensor | None = None  # of siblings, during a call
    _is_empty = False  # during a call: the tensor has no values (of an expert that gets no token)

    def __init__(self, qscheme: tuple, *, fake_quant: bool = False, observe: bool = True, **annotation: object) -> None:
        if unknown := sorted(set(annotation) - _ANNOTATION):
            raise MXError(f"unknown argument {unknown[0]!r} of {type(self).__name__}")
        # FakeQuantizeBase, among the bases of MXFakeQuantize, would register the flags as tensors: testing a tensor
        # breaks the graph of torch.compile at each module. The initializer of the collector calls none of torchao's.
        spec, ste, rule = spec_of_qscheme(qscheme), ste_of_qscheme(qscheme), tensor_scale_of_qscheme(qscheme)
        super().__init__(spec)
        self.dtype = torch.uint8
        self.is_dynamic = False
        self.qscheme = qscheme
        self.ste = ste
        self.static_scale = StaticTensorScale(self.spec, rule) if TENSOR_SCALES[rule] else None
        self.fake_quant_enabled, self.observer_enabled = fake_quant, observe
        self.observe_once = False  # set for constant tensors: every batch would add the same
        self._observed = False

    @property
    def _collects(self) -> bool:
        return self.observer_enabled and not (self.observe_once and self._observed)

    @property
    def _follows(self) -> bool:
        return self.follows_training and self.training and self.static_scale is not None

    @property
    def is_done(self) -> bool:
        """True if another batch would not change the statistics, for example of a constant that was observed once."""
        return not (self._collects or self._follows)

    def forward(self, x: Tensor, amax: Tensor | None = None) -> Tensor:
        self._amax = amax  # not an argument of `collect`, which subclasses override
        self._is_empty = self.static_scale is not None and not x.numel()
        try:
            return self._observe(x)
        finally:
            self._amax, self._is_empty = None, False  # torch.export refuses modules that keep a new tensor

    def _observe(self, x: Tensor) -> Tensor:
        observes, follows = self._collects, self._follows
        if (observes or follows) and not in_backward_pass():
            self._check_values(x)
            # not of values that other observers quantized, so that the converted model computes the same
            if self.static_scale is not None and (follows or not self.fake_quant_enabled):
                self.static_scale.observe(x)
            if observes:
                self.collect(x)
                self._observed = True
        if not self.fake_quant_enabled:
            return x
        return fake_quantize_mx(x, self.spec, ste=self.ste, tensor_scale=self.tensor_scale)

    @property
    def tensor_scale(self) -> Tensor | None:
        """The scale of a whole tensor, () float32: a number that calibration fixed, an MXError before the first; or
        during a call the scale that siblings share. None: each tensor has its own, if the format has one, and so has an
        empty one during its call."""
        if self.static_scale is not None:
            return None if self._is_empty else self.static_scale.value("a tensor")
        return None if self._amax is None else tensor_scale_mx(self._amax, self.spec)

    def anchored(self, x: Tensor) -> Tensor:
        """Return the values that are quantized: of a slice of another format (`MXFakeQuantize.anchor`) not x itself.

        Args:
            x: the tensor.

        Returns:
            A tensor of the same shape.
        """
        return x

    def _check_values(self, x: Tensor) -> None:
        """Raise an MXError if x has no values to observe."""
        if not torch.compiler.is_dynamo_compiling() and is_fake(x) and not is_fake(self.values):
            fixed = " and choose tensor_scale='dynamic'" if self.static_scale is not None else ""
            raise MXError(
                "a subgraph of the model is traced for its gradient, so that there is nothing to observe in it: "
                f"calibrate under torch.no_grad(), or call disable_observer(model){fixed}"
            )

    def reset_statistics(self) -> None:
        """Reset the statistics."""
        super().reset_statistics()
        self._observed = False

    def calculate_qparams(self, **kwargs: object) -> None:
        """Raise an error: this hook of torch.ao has no meaning for block scales.

        Raises:
            MXError: always.
        """
        raise MXError("an MX tensor has no calibrated scale: each block's scale comes from its own values")

    def statistics_meta(self) -> dict[str, object]:
        """Return the statistics as meta for the `dequantize_mx` node that replaces this module.

        Returns:
            `QuantizationStatistics` under `STATISTICS_KEY`; empty before the first tensor.
        """
        statistics = self.statistics
        return {} if statistics is None else {STATISTICS_KEY: statistics}

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the call of this module by a quantize/dequantize pair; torchao's convert calls this.

        Args:
            model: the prepared graph, which is changed.
            node: the call of this module in it.
        """
        x = node_arg(node)
        x.meta["val"] = observed_value(node)
        tensor_scale = None if self.static_scale is None else self.static_scale.store(model, x)
        amax = node_arg(node, 1) if node.args[1:] else None
        dequantize = insert_quantize_dequantize(x, self.spec, next(iter(node.users), None), tensor_scale, amax)
        dequantize.meta.update(node.meta[NOTES_KEY] if NOTES_KEY in node.meta else self.statistics_meta())
        node.replace_all_uses_with(dequantize)
        model.graph.erase_node(node)
        if not self.folds_weights:  # finding all modules at each call would take a third of the conversion
            return
        modules = [model.get_submodule(str(n.target)) for n in model.graph.find_nodes(op="call_module")]
        if not any(isinstance(module, MXObserver) for module in modules):
            _refuse_accumulators(model)
            compute_codes(model, constant_nodes(model.graph))
            if any(isinstance(module, ScaledWeight) for module in modules):
                warnings.warn(
                    "torchao's convert_pt2e folds no batch norm of a model that pt2mx prepared for training, and "
                    "leaves the weights before them in float: convert with pt2mx.convert_pt2e",
                    stacklevel=2,
                )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._observed = bool(self.tensors)

    def extra_repr(self) -> str:
        return f"{self.spec}, axis={self.spec.axis}, fake_quant={self.fake_quant_enabled}"


def _refuse_accumulators(model: GraphModule) -> None:
    """Raise an MXError for a config with an accumulator: torchao's own convert_pt2e does not know it."""
    for node in model.graph.nodes:
        accumulator = getattr(node.meta.get(CONFIG_KEY), "accumulator", None)
        if accumulator is not None:
            raise MXError(
                f"the config of {node.name} has accumulator={str(accumulator)!r}, which torchao's convert_pt2e does "
                "not know: convert with pt2mx.convert_pt2e"
            )


def observer_of(node: Node) -> MXObserver | None:
    """Return the observer of ours that a node calls; None for other nodes."""
    module = called_module(node)
    return module if isinstance(module, MXObserver) else None


def observed_value(node: Node) -> object:
    """Return the fake tensor that an observer sees: the value of the nearest node before it that has one. torchao
    stores no values for its observers, nor for the nodes that replace them."""
    while node.meta.get("val") is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.meta.get("val")
