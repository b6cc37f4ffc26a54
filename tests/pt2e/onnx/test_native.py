"""The target "native": the types of its constants, and their values in onnxruntime."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import pt2mx
from pt2mx.pt2e.onnx.contents import onnx_info
from pt2mx.pt2e.onnx.export import export_onnx
from pt2mx.pt2e.onnx.files import from_torch
from pt2mx.pt2e.onnx.native import to_native
from pt2mx.pt2e.onnx.nodes import DequantizeMX
from tests.compare import same
from tests.flow import convert
from tests.models import module_of
from tests.onnx_nodes import DTYPES, run
from tests.random_values import random_values

#: format -> the types of codes and scales
TYPES = {
    "mxfp4": ("FLOAT4E2M1", "FLOAT8E8M0"),
    "fp4_e2m1{8}": ("UINT8", "FLOAT8E8M0"),  # onnxruntime takes FP4 in blocks of 16, 32, 64 and so on
    "mxfp8": ("FLOAT8E4M3FN", "FLOAT8E8M0"),
    "mxfp8_e5m2": ("FLOAT8E5M2", "FLOAT8E8M0"),
    "mxfp6": ("UINT8", "FLOAT8E8M0"),
    "mxint8": ("UINT8", "FLOAT8E8M0"),
    "nvfp4": ("FLOAT4E2M1", "FLOAT8E4M3FN"),
    "fp4_e2m1{16}(e4m3_f32_divisor)": ("FLOAT4E2M1", "FLOAT8E4M3FN"),
    "fp8_e4m3{16}(bf16)": ("FLOAT8E4M3FN", "BFLOAT16"),
    "fp8_e4m3{16}(e5m3)": ("FLOAT8E4M3FN", "UINT8"),
}


def adversarial(shape):
    return torch.cat([random_values(shape, torch.float32, kind) for kind in range(5)])


def types_of(model):
    return {tensor.name: TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize(("shape", "axis"), [((6, 70), -1), ((2, 45, 3), 1), ((33, 4), 0), ((64,), -1)])
@pytest.mark.parametrize("name", TYPES)
def test_weights_in_onnxruntime(name, shape, axis, dtype):
    """The values have the bits of pt2mx's operator."""
    spec, w = pt2mx.parse(name).replace(axis=axis), adversarial(shape)
    t = {"t": pt2mx.tensor_scale_mx(w, spec)} if spec.scale_format.tensor else {}
    scale, codes = pt2mx.quantize_mx(w, spec, tensor_scale=t.get("t"))
    constants = {"c": codes, "s": scale, **t}
    nodes = [
        DequantizeMX(spec, w.shape[axis], dtype).make([*constants], "v", "dq"),
        helper.make_node("Cast", ["v"], ["y"], to=1),
    ]
    initializers = [from_torch(value, name) for name, value in constants.items()]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, w.shape)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("pt2mx", 1)]
    model = to_native(
        helper.make_model(helper.make_graph(nodes, "net", [], [y], initializers), opset_imports=imports, ir_version=10)
    )
    onnx.checker.check_model(model, full_check=True)
    codes_type, scale_type = TYPES[name]
    if len(shape) == 1 and codes_type == "FLOAT4E2M1":
        codes_type = "UINT8"
    types = types_of(model)
    assert {name[0]: kind for name, kind in types.items() if name[0] != "t"} == {"c": codes_type, "s": scale_type}
    want = pt2mx.dequantize_mx(
        codes, scale, spec, target_dtype=DTYPES[dtype], length=w.shape[axis], tensor_scale=t.get("t")
    )
    assert same(run(model)[0], want.float())


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8"])
def test_an_exported_program(recipe, tmp_path):
    """The file has the weights of the default target in other types, the same nodes, and the same outputs."""
    model, x = nn.Sequential(nn.Linear(70, 64), nn.Linear(64, 8)).eval(), torch.randn(4, 70)
    converted = convert(model, (x,), recipe)
    counts = [export_onnx(converted, tmp_path / f"{t}.onnx", (x,), target=t) for t in ("pt2mx", "native")]
    files = [onnx.load(tmp_path / f"{t}.onnx") for t in ("pt2mx", "native")]
    assert counts == [4, 4] and set(TYPES[recipe]) <= {*types_of(files[1]).values()}
    assert torch.equal(*(run(file, x)[0] for file in files))
    before, after = (onnx_info(tmp_path / f"{t}.onnx") for t in ("pt2mx", "native"))
    assert after.weights == before.weights and after.activations == before.activations


@pytest.mark.compiled
def test_embeddings_and_tied_heads_stay_bytes(tmp_path):
    """Their constants are read by Gather, which takes none of ONNX's small types."""
    ids = torch.randint(48, (3, 5))
    tied = module_of(
        lambda self, ids: nn.functional.linear(self.linear(self.embedding(ids)), self.embedding.weight),
        embedding=nn.Embedding(48, 64),
        linear=nn.Linear(64, 64),
    )
    converted = convert(tied.eval(), (ids,), "mxfp4_weight_only")
    export_onnx(converted, tmp_path / "net.onnx", (ids,), target="native")
    model = onnx.load(tmp_path / "net.onnx")
    kinds = [
        types_of(model)[node.input[0]] for node, _ in DequantizeMX.nodes_in(model) if node.input[0] in types_of(model)
    ]
    assert sorted(kinds) == ["FLOAT4E2M1", "UINT8"]
    torch.testing.assert_close(run(model, ids)[0], converted(ids).detach(), rtol=1e-4, atol=1e-5)
