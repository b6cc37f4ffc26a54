"""pt2mx quantizes PyTorch models to the OCP Microscaling (MX) formats in the PT2 export flow."""

from pt2mx import entrypoint as _entrypoint  # noqa: F401 - first: the command `pt2mx` begins before torch is there

# isort: split
import sys
from typing import TYPE_CHECKING

from pt2mx import fx, pt2e
from pt2mx.analysis.compare import MX_FORMATS, compare_mx_formats, print_mx_format_table
from pt2mx.analysis.measure import mx_statistics
from pt2mx.arrays import mx_quantize
from pt2mx.deprecated import install as _install_old_names
from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS, FORMATS, ElementFormat, parse_element
from pt2mx.functional import dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.late import reach
from pt2mx.process import prepare_process
from pt2mx.spec import MXSpec, create_mx_spec, parse
from pt2mx.version import __version__

if TYPE_CHECKING:  # imported when they are reached
    from pt2mx import cpp, dtypes
    from pt2mx.fx.inductor_pass import LoweringPass
    from pt2mx.fx.lower import lower_to_inductor
    from pt2mx.fx.portable import make_portable
    from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
    from pt2mx.pt2e.checkpoints.load import load_checkpoint
    from pt2mx.pt2e.checkpoints.quantization_config import PT2MXConfig
    from pt2mx.pt2e.checkpoints.save import save_checkpoint
    from pt2mx.pt2e.convert import convert_pt2e
    from pt2mx.pt2e.debug.bisect import bisect
    from pt2mx.pt2e.debug.print_graph import print_graph
    from pt2mx.pt2e.debug.stages import compare_stages
    from pt2mx.pt2e.format_observer import MXFormatObserver
    from pt2mx.pt2e.language.language_model import LanguageModel
    from pt2mx.pt2e.language.quantize import quantize_language_model
    from pt2mx.pt2e.observer import (
        MXFakeQuantize,
        MXObserver,
        disable_fake_quant,
        disable_observer,
        enable_fake_quant,
        enable_observer,
    )
    from pt2mx.pt2e.onnx.export import export_onnx
    from pt2mx.pt2e.onnx.functions import onnx_functions
    from pt2mx.pt2e.onnx.quantize_onnx import quantize_onnx
    from pt2mx.pt2e.onnx.register import register_onnx_translations, unregister_onnx_translations
    from pt2mx.pt2e.optimize.distill import distill
    from pt2mx.pt2e.optimize.optimize import optimize
    from pt2mx.pt2e.optimize.report import optimization_report
    from pt2mx.pt2e.origin import origin_of
    from pt2mx.pt2e.packages.package import load_package
    from pt2mx.pt2e.packed_weights import packed_weights
    from pt2mx.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
    from pt2mx.pt2e.program import load_program, save_program
    from pt2mx.pt2e.qspec import mx_qspec
    from pt2mx.pt2e.quantizer.config import MXQuantizationConfig, get_default_mx_quantization_config
    from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
    from pt2mx.pt2e.report.report import quantization_report
    from pt2mx.pt2e.report.suggest import suggest_config
    from pt2mx.pt2e.sensitivity.accuracy_control import quantize_with_accuracy_control
    from pt2mx.pt2e.sensitivity.compare_recipes import compare_recipes
    from pt2mx.pt2e.sensitivity.sensitivity import sensitivity
    from pt2mx.tensor.mx_tensor import MXTensor
    from pt2mx.torchmx import MXConfig, QAttentionConfig, QLinearConfig, quantize_linear_, quantize_llm_

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "MX_FORMATS",
    "ElementFormat",
    "LanguageModel",
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
    "PT2MXConfig",
    "QAttentionConfig",
    "QLinearConfig",
    "__version__",
    "bisect",
    "compare_mx_formats",
    "compare_recipes",
    "compare_stages",
    "convert_checkpoint",
    "convert_pt2e",
    "cpp",
    "create_mx_spec",
    "dequantize_mx",
    "disable_fake_quant",
    "disable_observer",
    "distill",
    "dtypes",
    "enable_fake_quant",
    "enable_observer",
    "export_onnx",
    "fake_quantize_mx",
    "get_default_mx_quantization_config",
    "load_checkpoint",
    "load_package",
    "load_program",
    "lower_to_inductor",
    "make_portable",
    "mx_qspec",
    "mx_quantize",
    "mx_statistics",
    "onnx_functions",
    "optimization_report",
    "optimize",
    "origin_of",
    "packed_weights",
    "parse",
    "parse_element",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "print_graph",
    "print_mx_format_table",
    "quantization_report",
    "quantize_language_model",
    "quantize_linear_",
    "quantize_llm_",
    "quantize_mx",
    "quantize_onnx",
    "quantize_with_accuracy_control",
    "register_onnx_translations",
    "save_checkpoint",
    "save_program",
    "sensitivity",
    "suggest_config",
    "unregister_onnx_translations",
]

#: the same again, for Python
_LATE = {
    "PT2MXConfig": "pt2mx.pt2e.checkpoints.quantization_config",
    "convert_checkpoint": "pt2mx.pt2e.checkpoints.convert_files",
    "load_checkpoint": "pt2mx.pt2e.checkpoints.load",
    "save_checkpoint": "pt2mx.pt2e.checkpoints.save",
    "export_onnx": "pt2mx.pt2e.onnx.export",
    "onnx_functions": "pt2mx.pt2e.onnx.functions",
    "quantize_onnx": "pt2mx.pt2e.onnx.quantize_onnx",
    "register_onnx_translations": "pt2mx.pt2e.onnx.register",
    "unregister_onnx_translations": "pt2mx.pt2e.onnx.register",
    "packed_weights": "pt2mx.pt2e.packed_weights",
    "LoweringPass": "pt2mx.fx.inductor_pass",
    "lower_to_inductor": "pt2mx.fx.lower",
    "make_portable": "pt2mx.fx.portable",
    "convert_pt2e": "pt2mx.pt2e.convert",
    "bisect": "pt2mx.pt2e.debug.bisect",
    "print_graph": "pt2mx.pt2e.debug.print_graph",
    "compare_stages": "pt2mx.pt2e.debug.stages",
    "MXFormatObserver": "pt2mx.pt2e.format_observer",
    "LanguageModel": "pt2mx.pt2e.language.language_model",
    "quantize_language_model": "pt2mx.pt2e.language.quantize",
    "MXFakeQuantize": "pt2mx.pt2e.observer",
    "MXObserver": "pt2mx.pt2e.observer",
    "disable_fake_quant": "pt2mx.pt2e.observer",
    "disable_observer": "pt2mx.pt2e.observer",
    "enable_fake_quant": "pt2mx.pt2e.observer",
    "enable_observer": "pt2mx.pt2e.observer",
    "distill": "pt2mx.pt2e.optimize.distill",
    "optimization_report": "pt2mx.pt2e.optimize.report",
    "optimize": "pt2mx.pt2e.optimize.optimize",
    "origin_of": "pt2mx.pt2e.origin",
    "prepare_pt2e": "pt2mx.pt2e.prepare",
    "prepare_qat_pt2e": "pt2mx.pt2e.prepare",
    "load_package": "pt2mx.pt2e.packages.package",
    "load_program": "pt2mx.pt2e.program",
    "save_program": "pt2mx.pt2e.program",
    "mx_qspec": "pt2mx.pt2e.qspec",
    "MXQuantizationConfig": "pt2mx.pt2e.quantizer.config",
    "get_default_mx_quantization_config": "pt2mx.pt2e.quantizer.config",
    "MXQuantizer": "pt2mx.pt2e.quantizer.quantizer",
    "quantization_report": "pt2mx.pt2e.report.report",
    "suggest_config": "pt2mx.pt2e.report.suggest",
    "quantize_with_accuracy_control": "pt2mx.pt2e.sensitivity.accuracy_control",
    "compare_recipes": "pt2mx.pt2e.sensitivity.compare_recipes",
    "sensitivity": "pt2mx.pt2e.sensitivity.sensitivity",
    "MXTensor": "pt2mx.tensor.mx_tensor",
    "MXConfig": "pt2mx.torchmx",
    "QAttentionConfig": "pt2mx.torchmx",
    "QLinearConfig": "pt2mx.torchmx",
    "quantize_linear_": "pt2mx.torchmx",
    "quantize_llm_": "pt2mx.torchmx",
}

reach(sys.modules[__name__], _LATE)
for _package in (fx, pt2e):
    reach(_package)
_install_old_names()
prepare_process()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
