"""The implementations that `adapters.py` scores: a generator of cases for each, which imports the library.

A case has what `check` needs of one format, in the library's own conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mx_conformance.errors import MXError
from mx_conformance.formats import FORMATS, parse_element

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pt2mx.spec import MXSpec


class Case(NamedTuple):
    """One format of an implementation: arguments of `check`; `variant` tells cases of one format apart."""

    format: str
    quantize: Callable[[Any], Any] | None = None
    dequantize: Callable[[Any, Any], Any] | None = None
    scale_mode: str | None = None
    rounding: str | None = None
    packing: str | None = None
    full_range: bool | None = None
    framework: str = "torch"
    dtype: str = "float32"
    elements_only: bool = False
    variant: str = ""


def pt2mx_torch() -> Iterator[Case]:
    """Yield the cases of pt2mx's reference kernel, plain torch operations: it must have no deviation."""
    from pt2mx.kernels import reference_chunked

    return _pt2mx(reference_chunked.quantize, reference_chunked.dequantize)


def pt2mx_cpp() -> Iterator[Case]:
    """Yield the cases of pt2mx's C++ kernel: it must have no deviation.

    Raises:
        MXError: if no compiler has built it.
    """
    from pt2mx.kernels.cpu import build
    from pt2mx.kernels.cpu import quantize as cpu
    from pt2mx.ops.quantization import Dequantize, Quantize

    if not build.is_available():
        raise MXError("the C++ kernels are not built: see `pt2mx doctor`")

    def quantize(x: Tensor, spec: MXSpec, seed: None) -> Any:
        return cpu.quantize(Quantize(x, spec, seed), spec)

    def dequantize(data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int) -> Any:
        call = Dequantize(data, scale, spec, dtype, length)
        return cpu.dequantize(call, spec, length)

    return _pt2mx(quantize, dequantize)


def _pt2mx(quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> Iterator[Case]:
    import torch

    from pt2mx.modes import scale_modes
    from pt2mx.scale_formats import SCALE_FORMATS
    from pt2mx.spec import MXSpec

    def quantized(spec: MXSpec, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, spec, None)

    def dequantized(spec: MXSpec, data: Tensor, scale: Tensor) -> Tensor:
        return dequantize(data, scale, spec, torch.float32, data.shape[1] * 8 // spec.element.bits)

    for name in FORMATS:
        for mode in scale_modes(SCALE_FORMATS["e8m0"], MXSpec(name).element):
            spec = MXSpec(name, axis=1, scale_mode=mode)
            yield Case(name, partial(quantized, spec), partial(dequantized, spec), mode, "even", "low_first", False)


def torchao() -> Iterator[Case]:
    """`to_mx` and `to_dtype` of torchao's prototype `mx_formats`, by each of its scale modes."""
    import torch
    from torchao.prototype.mx_formats import constants
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

    dtypes = {
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp6_e3m2": getattr(constants, "DTYPE_FP6_E3M2", None),
        "fp6_e2m3": getattr(constants, "DTYPE_FP6_E2M3", None),
        "fp4_e2m1": torch.float4_e2m1fn_x2,
    }

    def quantize(dtype: object, mode: ScaleCalculationMode, x: Tensor) -> tuple[Tensor, Tensor]:
        return to_mx(x, dtype, 32, mode)

    def dequantize(dtype: object, data: Tensor, scale: Tensor) -> Tensor:
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2:
            data = data.view(dtype)
        return to_dtype(data, scale.view(torch.float8_e8m0fnu), dtype, 32, torch.float32)

    for name, dtype in dtypes.items():
        if dtype is None:  # versions that have no FP6
            continue
        for mode in ScaleCalculationMode:
            yield Case(name, partial(quantize, dtype, mode), partial(dequantize, dtype), mode.value)


def compressed_tensors() -> Iterator[Case]:
    """Scales of compressed-tensors' observers, and its compressors; llm-compressor uses both."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    formats = {
        "fp8_e4m3": (8, "mxfp8-quantized", "weight"),
        "fp6_e2m3": (6, "mxfp6-pack-quantized", "weight_packed"),
        "fp4_e2m1": (4, "mxfp4-pack-quantized", "weight_packed"),
    }

    def quantize(codec: type[BaseCompressor], scheme: QuantizationScheme, key: str, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        state = codec.compress({"weight": x, "weight_scale": scale}, scheme)
        return state["weight_scale"], state[key]

    def dequantize(
        codec: type[BaseCompressor], scheme: QuantizationScheme, key: str, data: Tensor, scale: Tensor
    ) -> Tensor:
        data = data.view(torch.float8_e4m3fn) if scheme.weights.num_bits == 8 else data
        return codec.decompress({key: data, "weight_scale": scale}, scheme)["weight"]

    for name, (bits, compressor, key) in formats.items():
        arguments = QuantizationArgs(
            num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        codec = BaseCompressor.get_value_from_registry(compressor)
        yield Case(name, partial(quantize, codec, scheme, key), partial(dequantize, codec, scheme, key))


def gguf() -> Iterator[Case]:
    """MXFP4 of `gguf-py`, the Python package of llama.cpp, in its order of codes."""
    from gguf import GGMLQuantizationType
    from gguf import dequantize as decode
    from gguf import quantize as encode

    block = 17  # bytes: the scale and 16 of codes

    def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        blocks = encode(x, GGMLQuantizationType.MXFP4).reshape(len(x), -1, block)
        return blocks[..., 0], blocks[..., 1:].reshape(len(x), -1)

    def dequantize(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
        blocks = np.concatenate([scale[..., None], data.reshape(len(data), -1, block - 1)], axis=-1)
        return decode(blocks.reshape(len(data), -1), GGMLQuantizationType.MXFP4)

    yield Case("fp4_e2m1", quantize, dequantize, packing="halves", framework="numpy")


def transformers() -> Iterator[Case]:
    """The decoder of gpt-oss's MXFP4 weights in transformers: it only decodes."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def dequantize(data: Tensor, scale: Tensor) -> Tensor:
        blocks = data.view(1, len(data), -1, 16)  # (experts, rows, blocks, bytes)
        return convert_moe_packed_tensors(blocks, scale[None], dtype=torch.float32)[0].T

    yield Case("fp4_e2m1", None, dequantize, packing="low_first")


def ml_dtypes() -> Iterator[Case]:
    """Casts to the element dtypes of ml_dtypes, without a scale; scale bytes are read as `float8_e8m0fnu`."""
    import ml_dtypes

    dtypes = {
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
        "fp6_e3m2": ml_dtypes.float6_e3m2fn,
        "fp6_e2m3": ml_dtypes.float6_e2m3fn,
        "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    }

    def quantize(dtype: type, x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float32)

    def dequantize(dtype: type, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
        factors = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        return data.view(dtype).astype(np.float32) * factors.repeat(32, -1)

    for name, dtype in dtypes.items():
        packing = None if "8" in name else "bytes"
        functions = partial(quantize, dtype), partial(dequantize, dtype)
        yield Case(name, *functions, packing=packing, framework="numpy", elements_only=True)


def onnx() -> Iterator[Case]:
    """ONNX's reference evaluator: `Cast` to elements, and `DequantizeLinear` with E8M0 scales."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    types = {
        "fp8_e4m3": TensorProto.FLOAT8E4M3FN,
        "fp8_e5m2": TensorProto.FLOAT8E5M2,
        "fp4_e2m1": TensorProto.FLOAT4E2M1,
    }
    opset = 25  # the first with E8M0 scales

    def evaluator(nodes: list, **inputs: int) -> ReferenceEvaluator:
        values = [helper.make_tensor_value_info(name, dtype, [None, None]) for name, dtype in inputs.items()]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])
        graph = helper.make_graph(nodes, "graph", values, [output])
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))

    def quantize(cast: ReferenceEvaluator, x: np.ndarray) -> np.ndarray:
        return cast.run(None, {"x": x})[0]

    def dequantize(decoder: ReferenceEvaluator, element: int, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
        codes = data.view(helper.tensor_dtype_to_np_dtype(element))
        scales = scale.view(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E8M0))
        return decoder.run(None, {"x": codes, "scale": scales})[0]

    for name, element in types.items():
        there = helper.make_node("Cast", ["x"], ["codes"], to=element, saturate=1)
        back = helper.make_node("Cast", ["codes"], ["y"], to=TensorProto.FLOAT)
        cast = evaluator([there, back], x=TensorProto.FLOAT)
        options = {"axis": 1, "block_size": 32, "output_dtype": TensorProto.FLOAT}
        node = helper.make_node("DequantizeLinear", ["x", "scale"], ["y"], **options)
        decoder = evaluator([node], x=element, scale=TensorProto.FLOAT8E8M0)
        packing = None if "8" in name else "bytes"
        functions = partial(quantize, cast), partial(dequantize, decoder, element)
        yield Case(name, *functions, packing=packing, framework="numpy", elements_only=True)


def openvino() -> Iterator[Case]:
    """OpenVINO on the CPU: `Convert` to elements, and packed constants times E8M0 scales."""
    import openvino
    from openvino import opset16

    types = {"fp8_e4m3": openvino.Type.f8e4m3, "fp8_e5m2": openvino.Type.f8e5m2, "fp4_e2m1": openvino.Type.f4e2m1}

    def compiled(result: openvino.Output, inputs: list) -> openvino.CompiledModel:
        return openvino.compile_model(openvino.Model([opset16.result(result)], inputs), "CPU")

    def constant(data: np.ndarray, shape: list[int], dtype: openvino.Type) -> openvino.op.Constant:
        return openvino.op.Constant(openvino.Tensor(data, openvino.Shape(shape), dtype))

    def quantize(convert: openvino.CompiledModel, x: np.ndarray) -> np.ndarray:
        return convert(x)[0]

    def dequantize(element: openvino.Type, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
        n = data.shape[1] * (8 // element.bitwidth)
        codes = constant(data, [len(data), n // 32, 32], element)
        scales = constant(scale, [*scale.shape, 1], openvino.Type.f8e8m0)
        values = opset16.multiply(opset16.convert(codes, "f32"), opset16.convert(scales, "f32"))
        return compiled(values, [])({})[0].reshape(len(data), n)

    for name, element in types.items():
        x = opset16.parameter([-1, 32], np.float32)
        convert = compiled(opset16.convert(opset16.convert(x, element), "f32"), [x])
        functions = partial(quantize, convert), partial(dequantize, element)
        yield Case(name, *functions, framework="numpy", elements_only=True)


def nncf() -> Iterator[Case]:
    """NNCF: weights in its modes MXFP4 and MXFP8_E4M3. It returns values."""
    from nncf import CompressWeightsMode
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import float_quantize_dequantize_weight
    from nncf.tensor import Tensor as Array

    modes = {"fp8_e4m3": CompressWeightsMode.MXFP8_E4M3, "fp4_e2m1": CompressWeightsMode.MXFP4}

    def quantize(config: WeightCompressionConfig, x: np.ndarray) -> np.ndarray:
        return float_quantize_dequantize_weight(Array(x), config, (1,)).as_numpy_tensor().data.reshape(x.shape)

    for name, mode in modes.items():
        yield Case(name, partial(quantize, WeightCompressionConfig(mode, 32)), framework="numpy")


def modelopt() -> Iterator[Case]:
    """NVIDIA ModelOpt: its MXFP4 and MXFP8 tensors."""
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor

    def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scale = MXFP8QTensor.quantize(x)
        return scale, quantized._quantized_data

    def dequantize_fp8(data: Tensor, scale: Tensor) -> Tensor:
        return MXFP8QTensor(data.shape, torch.float32, data.view(torch.float8_e4m3fn)).dequantize(scale=scale)

    def quantize_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scale = MXFP4QTensor.quantize(x, 32)
        return scale.view(len(x), -1), quantized._quantized_data

    def dequantize_fp4(data: Tensor, scale: Tensor) -> Tensor:
        shape = torch.Size([len(data), 2 * data.shape[1]])
        return MXFP4QTensor(shape, torch.float32, data).dequantize(scale=scale, block_sizes={-1: 32})

    yield Case("fp8_e4m3", quantize_fp8, dequantize_fp8)
    yield Case("fp4_e2m1", quantize_fp4, dequantize_fp4)


def auto_round() -> Iterator[Case]:
    """AutoRound: its data types `mx_fp` and `mx_fp_rceil`, and `mx_fp_rceil_v2` of FP4. They return values."""
    from auto_round.data_type import mxfp

    formats = {
        "fp8_e4m3": "mx_fp8e4m3",
        "fp8_e5m2": "mx_fp8e5m2",
        "fp6_e3m2": "mx_fp6e3m2",
        "fp6_e2m3": "mx_fp6e2m3",
        "fp4_e2m1": "mx_fp4e2m1",
        "int8": "mx_int8",
    }

    def quantize(function: Callable[..., tuple], name: str, x: Tensor) -> Tensor:
        return function(x, bits=FORMATS[name].bits, group_size=32, data_type=formats[name])[0].reshape(x.shape)

    for name in formats:
        yield Case(name, partial(quantize, mxfp.quant_mx, name), scale_mode="floor")
        yield Case(name, partial(quantize, mxfp.quant_mx_rceil, name), scale_mode="rceil")
    yield Case("fp4_e2m1", partial(quantize, mxfp.quant_mx_rceil_v2, "fp4_e2m1"), scale_mode="rceil_v2")


def brevitas() -> Iterator[Case]:
    """Brevitas: its MX quantizers of activations. They return values."""
    import torch
    from brevitas.nn import QuantIdentity
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act, MXInt8Act

    @torch.no_grad()
    def quantize(layer: QuantIdentity, x: Tensor) -> Tensor:
        return layer(x)

    for name, quantizer in {"fp8_e4m3": MXFloat8e4m3Act, "int8": MXInt8Act}.items():
        yield Case(name, partial(quantize, QuantIdentity(quantizer, group_dim=-1).eval()))


def neural_compressor() -> Iterator[Case]:
    """Intel Neural Compressor: `quantize_mx_op` of its algorithm `mx_quant`, ties to even. It returns values."""
    from neural_compressor.torch.algorithms.mx_quant.utils import quantize_mx_op

    def quantize(name: str, x: Tensor) -> Tensor:
        return quantize_mx_op(x, name, "even", 32, axes=[-1])

    for name in FORMATS:
        yield Case(name, partial(quantize, name), scale_mode="floor", rounding="even")


def quark() -> Iterator[Case]:
    """AMD Quark: `fake_quantize_mx` of its emulation of hardware, by its three scale rules. It returns values."""
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    def quantize(element: str, mode: str, x: Tensor) -> Tensor:
        return fake_quantize_mx(x, 1, 32, mode, mx_element_dtype=element)

    for name in FORMATS:
        for mode in ("floor", "ceil", "even"):
            yield Case(name, partial(quantize, "fp4" if name == "fp4_e2m1" else name, mode), scale_mode=mode)


def torchmx() -> Iterator[Case]:
    """TorchMX: `quantize_mx` and `dequantize_mx`, of bfloat16."""
    import torch
    from torchmx import dtypes
    from torchmx.mx_tensor import dequantize_mx, quantize_mx

    formats = {
        "fp8_e4m3": dtypes.float8_e4m3,
        "fp6_e3m2": dtypes.float6_e3m2,
        "fp6_e2m3": dtypes.float6_e2m3,
        "fp4_e2m1": dtypes.float4_e2m1,
        "int8": dtypes.int8,
    }

    def quantize(dtype: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_mx(x, dtype, 32)

    def dequantize(name: str, dtype: str, data: Tensor, scale: Tensor) -> Tensor:
        stored = torch.int8 if name == "int8" else torch.uint8
        return dequantize_mx(data.view(stored), scale, dtype, 32, torch.bfloat16, -1)

    for name, dtype in formats.items():
        yield Case(name, partial(quantize, dtype.name), partial(dequantize, name, dtype.name), dtype="bfloat16")


def pychop() -> Iterator[Case]:
    """pychop: `mx_quantize` of NumPy arrays, a row at a time: its blocks run over all values. It returns values."""
    from pychop.mx_formats import MX_FORMATS, mx_quantize

    def quantize(name: str, x: np.ndarray) -> np.ndarray:
        rows = [x] if x.shape[1] % 32 == 0 else list(x)
        values = [np.asarray(mx_quantize(row, name, 32, backend="numpy")).ravel() for row in rows]
        return np.concatenate(values).reshape(x.shape)

    for name in MX_FORMATS:
        yield Case(parse_element(name).name, partial(quantize, name), framework="numpy")


def gfloat() -> Iterator[Case]:
    """gfloat: `encode_block` and `decode_block`, with its scale of the largest magnitude."""
    from gfloat import BlockFormatInfo, decode_block, quantize_block
    from gfloat.block import compute_scale_amax
    from gfloat.formats import all_block_formats

    def quantize(info: BlockFormatInfo, x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(len(x), -1, 32).reshape(-1, 32).astype(np.float64)
        return np.stack([quantize_block(info, block, compute_scale_amax) for block in blocks]).reshape(x.shape)

    def dequantize(info: BlockFormatInfo, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
        blocks = np.concatenate([scale.reshape(-1, 1), data.reshape(-1, 32)], axis=-1)
        return np.array([list(decode_block(info, block)) for block in blocks.tolist()]).reshape(data.shape)

    for info in all_block_formats:
        name = parse_element(info.name).name
        packing = "bytes" if info.etype.bits < 8 else None
        yield Case(name, partial(quantize, info), partial(dequantize, info), packing=packing, framework="numpy")


def microxcaling() -> Iterator[Case]:
    """microxcaling: `quantize_mx_op`, by its two roundings to nearest. It returns values."""
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    def quantize(specs: dict, name: str, rounding: str, x: Tensor) -> Tensor:
        return quantize_mx_op(x, specs, elem_format=name, axes=[-1], round=rounding)

    for name in FORMATS:
        for its, rounding in {"nearest": "half_away", "even": "even"}.items():
            specs = finalize_mx_specs({"w_elem_format": name, "block_size": 32, "scale_bits": 8, "custom_cuda": False})
            yield Case(name, partial(quantize, specs, name, its), scale_mode="floor", rounding=rounding)
