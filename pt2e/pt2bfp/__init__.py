"""pt2-bfp's API: the names of d-Matrix's block floating point quantizer (`dmx.compressor.pt2bfp`) over this flow.

A program written for it runs with its imports changed to `pt2mx.pt2e.pt2bfp`. Blocks run along the axis of the format,
or along the axis that an operator reduces. The scale of a block comes from its values, so observers of block formats
change no number, and `eps`, `qscheme` and similar arguments have no effect.
"""

from collections.abc import Callable
from types import SimpleNamespace

from pt2mx.analysis.agreement import check_diff
from pt2mx.pt2e.flow.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.observe.range_observers import MXHistogramObserver, MXMinMaxObserver, MXMovingAverageMinMaxObserver
from pt2mx.pt2e.observe.switches import disable_fake_quant, disable_observer, enable_fake_quant, enable_observer
from pt2mx.pt2e.observe.torchao_pt2e import (
    OperatorConfig,
    QuantizationAnnotation,
    SharedQuantizationSpec,
    annotate_input_qspec_map,
    annotate_output_qspec,
)
from pt2mx.pt2e.pt2bfp.formats import _get_format_params as _get_format_params
from pt2mx.pt2e.pt2bfp.formats import _quantize_bfp as _quantize_bfp
from pt2mx.pt2e.pt2bfp.formats import max_norm, min_norm
from pt2mx.pt2e.pt2bfp.quantize import (
    DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
    convert,
    prepare,
    prepare_qat,
    quantize,
)
from pt2mx.pt2e.pt2bfp.quantize_graph import convert_fx, convert_pt2e, prepare_fx, prepare_qat_fx
from pt2mx.pt2e.pt2bfp.quantizer import (
    BFPQuantizer,
    get_bias_qspec,
    get_input_act_qspec,
    get_output_act_qspec,
    get_weight_qspec,
)
from pt2mx.pt2e.pt2bfp.specs import (
    DEFAULT_FORMAT,
    BFPQuantizationConfig,
    BFPQuantizationSpec,
    QConfig,
    default_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
)
from pt2mx.spec import parse

__all__ = [
    "DEFAULT_FORMAT",
    "DEFAULT_STATIC_QUANT_MODULE_MAPPINGS",
    "BFPOperatorConfig",
    "BFPQuantizationAnnotation",
    "BFPQuantizationConfig",
    "BFPQuantizationSpec",
    "BFPQuantizer",
    "FakeQuantize",
    "Format",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "QConfig",
    "QConfigMapping",
    "SharedBFPQuantizationSpec",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "check_diff",
    "convert",
    "convert_fx",
    "convert_pt2e",
    "default_fake_quant",
    "default_per_channel_weight_fake_quant",
    "default_weight_fake_quant",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "get_bias_qspec",
    "get_input_act_qspec",
    "get_output_act_qspec",
    "get_weight_qspec",
    "max_norm",
    "min_norm",
    "prepare",
    "prepare_fx",
    "prepare_pt2e",
    "prepare_qat",
    "prepare_qat_fx",
    "prepare_qat_pt2e",
    "quantize",
]

QConfigMapping = BFPQuantizer
BFPQuantizationAnnotation = QuantizationAnnotation
SharedBFPQuantizationSpec = SharedQuantizationSpec
BFPOperatorConfig = OperatorConfig
_annotate_input_qspec_map, _annotate_output_qspec = annotate_input_qspec_map, annotate_output_qspec
_ObserverConstructor = Callable  # programs use it in annotations
Format = SimpleNamespace(from_shorthand=parse)

PlaceholderObserver = MXObserver
MinMaxObserver = MXMinMaxObserver
PerChannelMinMaxObserver = MXMinMaxObserver.with_args(ch_axis=0)
MovingAverageMinMaxObserver = MXMovingAverageMinMaxObserver
MovingAveragePerChannelMinMaxObserver = MXMovingAverageMinMaxObserver.with_args(ch_axis=0)
HistogramObserver = MXHistogramObserver
FakeQuantize = MXFakeQuantize
