"""Plain `torch.onnx.export` of converted models: every quantized value is compared with pt2mx's."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.export import Dim

import pt2mx
from pt2mx import MXQuantizer, ops
from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.nodes import FakeQuantizeMX
from tests.compare import same
from tests.flow import convert
from tests.onnx_nodes import run, session

BATCH = Dim("batch")


@pytest.fixture(autouse=True)
def registered():
    pt2mx.register_onnx_translations()
    yield
    pt2mx.unregister_onnx_translations()


class Block(nn.Module):
    """An embedding, a convolution with ragged blocks along the channels, and matmuls of two computed tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.conv = nn.Embedding(50, 40), nn.Conv1d(40, 48, 3, padding=1)
        self.out = nn.Linear(48, 8, bias=False)

    def forward(self, ids):  # (B, S) -> (B, S, 8)
        x = torch.relu(self.conv(self.embedding(ids).transpose(1, 2)))
        return self.out((x @ (x.transpose(1, 2) @ x)).transpose(1, 2))


def plain(converted, *inputs, **options):
    return torch.onnx.export(converted, inputs, dynamo=True, verbose=False, **options)


def values_of(model, names, feeds):
    """Return values of a model by name, including values that its optimizer computed."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer}
    known = {value.name for value in model.graph.output}
    computed = [name for name in dict.fromkeys(names) if name not in constants and name not in feeds]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed if name not in known)
    outputs = dict(zip(computed, session(model).run(computed, feeds), strict=True))
    return {name: torch.from_numpy(np.array({**constants, **feeds, **outputs}[name])) for name in names}


@pytest.mark.parametrize(
    ("recipe", "optimize"), [("mxfp4", True), pytest.param("mxint8", False, marks=pytest.mark.slow)]
)
def test_every_quantized_operand_has_the_bits_of_pt2mx(recipe, optimize):
    """The exporter inlines the functions and its optimizer renames values: read the operands of the operators."""
    ids, shapes = torch.randint(0, 50, (2, 12)), ({0: BATCH},)
    converted = convert(Block(), (ids,), recipe, shapes=shapes)
    program = plain(converted, ids, dynamic_shapes=shapes, optimize=optimize)
    model, state = program.model_proto, program.exported_program.state_dict
    buffers = program.exported_program.graph_signature.inputs_to_buffers
    operands_of = {
        n: [x for x in n.all_input_nodes if x.target is ops.dequantize_mx] for n in program.exported_program.graph.nodes
    }
    written = {node.output[0]: node for node in model.graph.node}

    def expected(node, values):
        source = node.args[0]
        if source.op == "placeholder":
            codes, scale = (state[buffers[n.name]] for n in node.args[:2])
            return ops.dequantize_mx(codes, scale, *node.args[2:])
        quantize = source.args[0]
        return ops.fake_quantize_mx(values[quantize.args[0].name], *quantize.args[1:6], None, "identity")

    ids = torch.randint(0, 50, (3, 12))
    sources = [
        x.args[0].args[0].args[0].name for quantized in operands_of.values() for x in quantized if x.args[0].args
    ]
    operands = [name for n, quantized in operands_of.items() if quantized for name in written[n.name].input if name]
    values = values_of(model, [*sources, *operands], {model.graph.input[0].name: ids.numpy()})
    count = 0
    for node, quantized in operands_of.items():
        inputs = [values[name] for name in written[node.name].input] if quantized else []
        for x in quantized:
            want = expected(x, values)
            assert any(same(y, want) or (y.dim() == 2 and same(y.T, want)) for y in inputs if y.dim() == want.dim())
            count += 1
    assert count == 9
    with torch.no_grad():
        torch.testing.assert_close(run(model, ids)[0], converted(ids), rtol=0.02, atol=0.02)


@pytest.mark.compiled
def test_a_file_that_onnxruntime_runs(tmp_path):
    x = torch.randn(4, 128)
    converted = convert(nn.Linear(128, 256), (x,), "mxfp4")
    plain(converted, x, f=tmp_path / "net.onnx")
    with torch.no_grad():
        torch.testing.assert_close(run(str(tmp_path / "net.onnx"), x)[0], converted(x), rtol=1e-5, atol=1e-5)
    # the optimizer decodes small weights only
    dtypes = {c.name: c.data_type for c in onnx.load(tmp_path / "net.onnx").graph.initializer}
    assert onnx.TensorProto.UINT8 in dtypes.values()


@pytest.mark.compiled
@pytest.mark.parametrize("opset", [pytest.param(18, marks=pytest.mark.slow), 23])
def test_opsets(opset):
    x = torch.randn(4, 40)
    converted = convert(nn.Linear(40, 8), (x,), "mxfp6")
    model = plain(converted, x, opset_version=opset).model_proto
    assert next(entry.version for entry in model.opset_import if entry.domain == "") == opset
    with torch.no_grad():
        torch.testing.assert_close(run(model, x)[0], converted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
def test_weights_that_are_quantized_at_each_call():
    x = torch.randn(4, 40)
    converted = convert(nn.Linear(40, 8), (x,), "mxfp4", fold=False)
    with torch.no_grad():
        torch.testing.assert_close(run(plain(converted, x).model_proto, x)[0], converted(x), rtol=1e-5, atol=1e-5)


def test_export_onnx_writes_the_same_nodes(tmp_path):
    x = torch.randn(4, 40)
    converted = convert(nn.Linear(40, 8), (x,), "mxfp4")
    assert pt2mx.export_onnx(converted, tmp_path / "net.onnx", (x,)) == 2
    assert len(list(FakeQuantizeMX.nodes_in(onnx.load(tmp_path / "net.onnx")))) == 1


def test_registration_can_be_repeated_and_undone():
    def count():
        registry = import_extra("onnxscript.function_libs.torch_lib.registration", "onnx").default_registry
        return [len(registry[name].overloads) for name in registry if name.startswith("pt2mx::")]

    pt2mx.register_onnx_translations()  # a second time
    assert count() == [1, 1, 1, 1]
    for _ in range(2):
        pt2mx.unregister_onnx_translations()
        assert count() == [0, 0, 0, 0]


@pytest.mark.slow
def test_without_registration_there_is_no_translation():
    pt2mx.unregister_onnx_translations()
    x = torch.randn(4, 40)
    with pytest.raises(torch.onnx.OnnxExporterError, match="pt2mx"):
        plain(convert(nn.Linear(40, 8), (x,), "mxfp4"), x)


@pytest.mark.slow
def test_a_rounding_without_onnx_form_is_an_error():
    x = torch.randn(4, 40)
    config = pt2mx.get_default_mx_quantization_config("mxfp4", "mxfp4", rounding="stochastic")
    converted = convert(nn.Linear(40, 8), (x,), MXQuantizer().set_global(config))
    with pytest.raises(torch.onnx.OnnxExporterError) as raised:
        plain(converted, x)
    error = raised.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, pt2mx.MXError) and "roundings even, half_away, half_up" in str(error)
