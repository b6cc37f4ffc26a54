"""pt2mx quantizes PyTorch models to the OCP Microscaling (MX) formats in the PT2 export flow."""

from pt2mx.pt2e.cli import interrupts as _interrupts  # noqa: F401 - first: it ends the command at Ctrl-C

# isort: split
from pt2mx import dtypes
from pt2mx.analysis.compare import MX_FORMATS, compare_mx_formats, print_mx_format_table
from pt2mx.analysis.measure import mx_statistics
from pt2mx.arrays import mx_quantize
from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS, FORMATS, ElementFormat, parse_element
from pt2mx.functional import dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.fx.inductor_pass import LoweringPass
from pt2mx.fx.lower import lower_to_inductor
from pt2mx.fx.portable import make_portable
from pt2mx.ops import inductor as _inductor  # noqa: F401 - registers the operators and their decompositions
from pt2mx.ops import linear as _linear  # noqa: F401 - registers the products with packed weights
from pt2mx.ops import mma_layout as _fragments  # noqa: F401 - registers the product with fragments
from pt2mx.ops import scaled_mm as _scaled_mm  # noqa: F401 - registers those of two packed tensors
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.format_observer import MXFormatObserver
from pt2mx.pt2e.observer import (
    MXFakeQuantize,
    MXObserver,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from pt2mx.pt2e.origin import origin_of
from pt2mx.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.program import load_program, save_program
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig, get_default_mx_quantization_config
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import quantization_report
from pt2mx.pt2e.report.suggest import suggest_config
from pt2mx.spec import MXSpec, create_mx_spec, parse
from pt2mx.tensor.mx_tensor import MXTensor
from pt2mx.torchmx import MXConfig, QAttentionConfig, QLinearConfig, quantize_linear_, quantize_llm_
from pt2mx.version import __version__

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "MX_FORMATS",
    "ElementFormat",
    "LoweringPass",
    "MXConfig",
    "MXError",
    "MXFakeQuantize",
    "MXFormatObserver",
    "MXObserver",
    "MXQuantizationConfig",
    "MXQuantizer",
    "MXSpec",
    "MXTensor",
    "QAttentionConfig",
    "QLinearConfig",
    "__version__",
    "compare_mx_formats",
    "convert_pt2e",
    "create_mx_spec",
    "dequantize_mx",
    "disable_fake_quant",
    "disable_observer",
    "dtypes",
    "enable_fake_quant",
    "enable_observer",
    "fake_quantize_mx",
    "get_default_mx_quantization_config",
    "load_program",
    "lower_to_inductor",
    "make_portable",
    "mx_quantize",
    "mx_statistics",
    "origin_of",
    "parse",
    "parse_element",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "print_mx_format_table",
    "quantization_report",
    "quantize_linear_",
    "quantize_llm_",
    "quantize_mx",
    "save_program",
    "suggest_config",
]
