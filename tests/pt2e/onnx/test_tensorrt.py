"""The target "tensorrt": its nodes, and those that ModelOpt's exporter writes where nvidia-modelopt is installed."""

import io
from unittest.mock import MagicMock

import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from pt2mx import MXError, MXQuantizer, export_onnx, get_default_mx_quantization_config
from tests.flow import convert
from tests.subgraph_models import Cond

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
QUANTIZE = ("TRT_MXFP8DynamicQuantize", {"axis": -1, "block_size": 32, "output_dtype": TensorProto.FLOAT8E4M3FN})
DEQUANTIZE = ("TRT_MXFP8DequantizeLinear", {"axis": -1, "block_size": 32, "output_dtype": TensorProto.FLOAT})


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()


def quantizer_of(weight="mxfp8(rceil)", activation="mxfp8(rceil)"):
    return MXQuantizer().set_global(get_default_mx_quantization_config(weight, activation))


def written(model, x, path, quantizer=None, shapes=None):
    """Return the file of a converted model for TensorRT."""
    export_onnx(convert(model, (x,), quantizer or quantizer_of(), shapes=shapes), path, (x,), shapes, target="tensorrt")
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def nodes_of(proto):
    """Return the operator and attributes of each node for TensorRT, sorted."""
    nodes = [node for node in proto.graph.node if node.domain == "trt"]
    return sorted(((n.op_type, {a.name: a.i for a in n.attribute}) for n in nodes), key=str)


def weights_of(proto):
    """Return the codes and scales of each weight, as bytes, by the shape of the codes."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    reads = [node.input for node in proto.graph.node if node.op_type == DEQUANTIZE[0] and node.input[0] in tensors]
    found = {}
    for codes, scale in reads:
        assert tensors[codes].data_type == TensorProto.FLOAT8E4M3FN and tensors[scale].data_type == TensorProto.UINT8
        found[tuple(tensors[codes].dims)] = tuple(numpy_helper.to_array(tensors[n]).tobytes() for n in (codes, scale))
    return found


def test_nodes_and_types(tmp_path):
    proto = written(layers(), X, tmp_path / "net.onnx", shapes=({0: torch.export.Dim("batch")},))
    assert nodes_of(proto) == [DEQUANTIZE] * 4 + [QUANTIZE] * 2
    assert {shape: (len(codes), len(scale)) for shape, (codes, scale) in weights_of(proto).items()} == {
        (96, 64): (96 * 64, 96 * 2),
        (32, 96): (32 * 96, 32 * 3),
    }
    assert not proto.functions and {entry.domain for entry in proto.opset_import} >= {"trt"}


@pytest.mark.compiled_except("model0-*")
@pytest.mark.parametrize(
    ("model", "shape", "quantizer", "message"),
    [
        (nn.Linear(64, 32), (8, 64), quantizer_of("mxfp4", None), r"no node for mxfp4_e2m1\{32\}.*: it takes mxfp8"),
        (nn.Linear(64, 32), (8, 64), quantizer_of(activation="mxfp8"), r"no node for mxfp8_e4m3\{32\}: it takes mxfp8"),
        (nn.Linear(80, 32), (8, 80), quantizer_of(), "80 values"),
        (nn.Conv2d(32, 8, 1), (1, 32, 4, 4), quantizer_of(), "of 4 dimensions"),
        (Cond(), (3, 64), quantizer_of(), "is in a branch or a loop, and for TensorRT"),
    ],
)
def test_what_tensorrt_lacks_is_named(model, shape, quantizer, message, tmp_path):
    with pytest.raises(MXError, match=message):
        written(model, torch.randn(shape), tmp_path / "net.onnx", quantizer)
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_equals_what_modelopt_writes(tmp_path, monkeypatch):
    exporters = pytest.importorskip("modelopt.onnx.export", reason="needs nvidia-modelopt[onnx]", exc_type=ImportError)
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.export_onnx import configure_linear_module_onnx_quantizers
    from modelopt.torch.quantization.extensions import get_cuda_ext_mx

    # the extension needs a GPU to compute values, which the traced nodes do not hold
    kernels = MagicMock(**{"fused_amax_convert.side_effect": lambda x, *others: x.clone()})
    monkeypatch.setattr(get_cuda_ext_mx, "extension", kernels, raising=False)
    model, file = mtq.quantize(layers(), mtq.MXFP8_DEFAULT_CFG), io.BytesIO()
    with configure_linear_module_onnx_quantizers(model):
        torch.onnx.export(model, (X,), file, dynamo=False, opset_version=20)
    theirs = onnx.load_model_from_string(file.getvalue())
    theirs = exporters.MXFP8QuantExporter.compress_weights(exporters.MXFP8QuantExporter.compute_scales(theirs))
    ours = written(layers(), X, tmp_path / "net.onnx")
    assert nodes_of(ours) == nodes_of(theirs) and weights_of(ours) == weights_of(theirs)
