import functools

import onnx
import pytest
import torch
from torch import nn
from torch.export import Dim

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor
from pt2mx.extras import import_extra
from pt2mx.kernels.select import USES
from pt2mx.ops.activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx
from pt2mx.pt2e.onnx.export import OPSETS, export_onnx
from pt2mx.pt2e.onnx.nodes import DOMAIN, DequantizeMX, FakeQuantizeMX
from tests.compare import same, sqnr
from tests.flow import convert, exported, reloaded
from tests.models import module_of
from tests.onnx_nodes import differences, run

BATCH, SEQUENCE = Dim("batch"), Dim("sequence", max=512)
# torch.export's warning for every recurrent module
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")


class Attention(nn.Module):
    """An embedding, one matmul for queries, keys and values, and probabilities along the sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.out = nn.Embedding(100, 96), nn.Linear(96, 288), nn.Linear(96, 96)

    def forward(self, ids):  # (B, S) -> (B, S, 96)
        x = self.embedding(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def images():  # (B, 40, H, W) -> (B, 20, H - 1, W - 1)
    """Return ragged blocks along the channels, a grouped and a transposed convolution."""
    torch.manual_seed(0)
    first, grouped = nn.Conv2d(40, 64, 3, padding=1), nn.Conv2d(64, 64, 3, groups=2)
    return nn.Sequential(first, nn.ReLU(), grouped, nn.ReLU(), nn.ConvTranspose2d(64, 20, 2))


def recurrent():  # (B, S, 40) -> (B, S, 48)
    torch.manual_seed(0)
    return module_of(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(40, 48, batch_first=True))


def matmul():  # (B, M, K), (B, K, N)
    """Return blocks along a dynamic dimension."""
    return module_of(lambda self, a, b: a @ b)


def branches():
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.linear(y), lambda y: self.linear(-y) * 2, (x,))

    torch.manual_seed(0)
    return module_of(forward, linear=nn.Linear(64, 64))


def ids(*shape):
    return torch.randint(0, 100, shape)


#: model, example inputs, dynamic shapes, other inputs, nodes of mxfp4
MODELS = {
    "attention": (Attention(), (ids(2, 50),), ({0: BATCH, 1: SEQUENCE},), [(ids(3, 7),), (ids(2, 64),)], 8),
    "images": (images(), (torch.randn(2, 40, 6, 6),), ({0: BATCH},), [(torch.randn(3, 40, 6, 6),)], 6),
    "recurrent": (recurrent(), (torch.randn(2, 3, 40),), ({0: BATCH},), [(torch.randn(4, 3, 40),)], 3),
    "matmul": (
        matmul(),
        (torch.randn(2, 3, 40), torch.randn(2, 40, 6)),
        ({2: Dim("k")}, {1: Dim("k")}),
        [(torch.randn(2, 3, n), torch.randn(2, n, 6)) for n in (7, 67, 64)],
        2,
    ),
}


def exported_to(path, model, inputs, recipe="mxfp4", shapes=None, **options):
    converted = convert(model, inputs, recipe, shapes=shapes)
    export_onnx(converted, path, inputs, shapes, **options)
    return converted, onnx.load(path)


@pytest.fixture(scope="module")
def exported_by(tmp_path_factory):
    """Export one of `MODELS` with a recipe, once for all tests."""

    @functools.cache
    def made(name, recipe):
        model, inputs, shapes, *_ = MODELS[name]
        return exported_to(tmp_path_factory.mktemp(name) / "net.onnx", model, inputs, recipe, shapes)

    return made


@pytest.mark.slow_except("matmul-mxfp4")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, "mxfp4") for name in MODELS]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("attention", "mxfp8"), ("images", "mxint8"), ("matmul", "mxfp6"))
    ],
)
def test_every_node_gives_the_bits_of_its_operator(name, recipe, exported_by):
    _, inputs, _, others, count = MODELS[name]
    converted, written = exported_by(name, recipe)
    names = [value.name for value in written.graph.input]
    for batch in (inputs, *others):
        wrong = differences(written, dict(zip(names, (x.numpy() for x in batch), strict=True)))
        assert len(wrong) == count and not any(wrong.values())
        with torch.no_grad():
            assert sqnr(run(written, *batch)[0], converted(*batch)) > 30


@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize("activation", [None, "nvfp4"])
def test_nvfp4_gives_the_values_of_the_converted_model(activation, tmp_path):
    """Weights have the tensor scale of their own, activations the static scale that calibration found."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).eval(), torch.randn(6, 64)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("nvfp4", activation))
    prepared = pt2mx.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted = pt2mx.convert_pt2e(prepared)
    count = export_onnx(converted, tmp_path / "net.onnx", (x,))
    written = onnx.load(tmp_path / "net.onnx")
    wrong = differences(written, {"input": x.numpy()})
    assert len(wrong) == count == (2 if activation is None else 4) and not any(wrong.values())
    inputs = {node.op_type.partition(".")[0]: len(node.input) for node in written.graph.node if node.domain == "pt2mx"}
    assert inputs == ({"DequantizeMX": 3} if activation is None else {"DequantizeMX": 3, "FakeQuantizeMX": 2})
    with torch.no_grad():
        torch.testing.assert_close(run(written, x)[0], converted(x), rtol=1e-5, atol=1e-6)


@pytest.mark.compiled_cases("images")
@pytest.mark.slow_except("images")
@pytest.mark.parametrize("name", ["attention", "images", "recurrent"])
def test_outputs_with_packed_weights_only(name, exported_by):
    _, inputs, _, others, _ = MODELS[name]
    converted, written = exported_by(name, "mxfp4_weight_only")
    assert not list(FakeQuantizeMX.nodes_in(written))
    for batch in (inputs, *others):
        with torch.no_grad():
            torch.testing.assert_close(run(written, *batch)[0], converted(*batch), rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
def test_float16(tmp_path):
    model = nn.Sequential(nn.Embedding(100, 96), nn.Linear(96, 8)).half()
    _, written = exported_to(tmp_path / "net.onnx", model, (ids(2, 5),), "mxfp8", ({0: BATCH},))
    batch = ids(3, 5)
    wrong = differences(written, {written.graph.input[0].name: batch.numpy()})
    assert len(wrong) == 3 and not any(wrong.values())
    assert run(written, batch)[0].dtype == torch.float16
    assert {node.dtype for _, node in DequantizeMX.nodes_in(written)} == {onnx.TensorProto.FLOAT16}


@pytest.mark.compiled
def test_bfloat16(tmp_path):
    """An embedding only: onnxruntime has no bfloat16 matmul on the CPU."""
    model = nn.Sequential(nn.Embedding(100, 96)).bfloat16()
    converted, written = exported_to(tmp_path / "net.onnx", model, (ids(2, 5),))
    (output,) = written.graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    written.graph.node.append(onnx.helper.make_node("Cast", [output.name], ["y"], to=onnx.TensorProto.FLOAT))
    output.CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    batch = ids(2, 5)
    assert same(run(written, batch)[0], converted(batch).float())


def test_branches(tmp_path):
    inputs = (torch.randn(2, 64),)
    converted, written = exported_to(tmp_path / "net.onnx", branches(), inputs, "mxfp8")
    for x in (inputs[0], -inputs[0]):
        assert sqnr(run(written, x)[0], converted(x)) > 100


@pytest.mark.compiled
def test_weights_have_the_bytes_of_the_converted_model(exported_by):
    converted, written = exported_by("attention", "mxfp4")
    constants = {c.name: torch.from_numpy(onnx.numpy_helper.to_array(c).copy()) for c in written.graph.initializer}
    for name, buffer in converted.named_buffers():
        if name.endswith(("_data", "_scale")):
            assert torch.equal(constants[name], buffer), name
    assert not any(tensor.is_floating_point() and tensor.numel() > 300 for tensor in constants.values())
    # rows are looked up packed
    gathered = [node for node in written.graph.node if node.op_type == "Gather"]
    assert {"embedding.weight_data", "embedding.weight_scale"} <= {node.input[0] for node in gathered}


@pytest.mark.compiled_cases("18")
@pytest.mark.slow_except("18")
@pytest.mark.parametrize("opset", [None, OPSETS[0], OPSETS[-1]])
def test_opsets(opset, tmp_path):
    model = nn.Sequential(nn.Embedding(100, 96), nn.GELU(), nn.Linear(96, 8))
    converted, written = exported_to(tmp_path / "net.onnx", model, (ids(2, 5),), "mxfp8", ({0: BATCH},), opset=opset)
    (version,) = [entry.version for entry in written.opset_import if entry.domain == ""]
    assert version == (opset or 20)
    batch = ids(3, 5)
    assert sqnr(run(written, batch)[0], converted(batch)) > 30


@pytest.mark.compiled
@pytest.mark.slow_except("mxfp4-0.15")
@pytest.mark.parametrize(("recipe", "ratio"), [("mxfp4", 0.15), ("mxfp8", 0.28)])
def test_size_of_the_file(recipe, ratio, tmp_path):
    model = nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 768))
    exported_to(tmp_path / "net.onnx", model, (torch.randn(2, 768),), recipe)
    floats = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert (tmp_path / "net.onnx").stat().st_size < ratio * floats


@pytest.mark.compiled
@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.slow), "matmul"])
def test_a_saved_program_has_its_inputs_and_shapes(name, exported_by, tmp_path):
    _, inputs, shapes, others, count = MODELS[name]
    converted, _ = exported_by(name, "mxfp4")
    program = reloaded(torch.export.export(converted, inputs, dynamic_shapes=shapes))
    assert export_onnx(program, tmp_path / "net.onnx") == count
    for batch in others:
        assert sqnr(run(str(tmp_path / "net.onnx"), *batch)[0], converted(*batch)) > 30


@pytest.mark.compiled_cases("True")
@pytest.mark.slow_except("True")
@pytest.mark.parametrize("positional", [True, False])
def test_keyword_inputs_in_any_order(positional, tmp_path):
    inputs = {name: torch.randn(40, 40) for name in "ab"}
    arguments = (tuple(inputs.values()), {}) if positional else ((), inputs)
    graph = torch.export.export(module_of(lambda self, a, b: a @ a - b), *arguments).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, MXQuantizer.from_recipe("mxfp8")))
    export_onnx(converted, tmp_path / "net.onnx", dict(reversed(inputs.items())))
    written = onnx.load(tmp_path / "net.onnx")
    assert [value.name for value in written.graph.input] == ["a", "b"]
    assert sqnr(run(written, *inputs.values())[0], converted(**inputs)) > 100


@pytest.mark.compiled
def test_lowered_model_with_fused_quantization(tmp_path, monkeypatch):
    x = torch.randn(2048, 64)  # large enough to be fused
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    monkeypatch.setitem(USES, "quantize the result of a matmul", {})  # as on most
    lowered = lower_to_inductor(convert(model.eval(), (x,), "mxfp8"))
    assert {n.target for n in lowered.graph.nodes} >= {activation_fake_quantize_mx, layer_norm_fake_quantize_mx}
    export_onnx(lowered, tmp_path / "lowered.onnx", (x,))
    assert sqnr(run(str(tmp_path / "lowered.onnx"), x)[0], lowered(x)) > 50


def test_lowered_model_and_a_rotated_one(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).eval(), torch.randn(4, 64)
    converted = convert(model, (x,))
    export_onnx(lower_to_inductor(converted), tmp_path / "lowered.onnx", (x,))
    assert sqnr(run(str(tmp_path / "lowered.onnx"), x)[0], converted(x)) > 100
    graph, quantizer = exported(model, x), MXQuantizer.from_recipe("mxfp4")
    rotated = pt2mx.optimize(graph, quantizer, [(x,)], algorithms=pt2mx.algorithms.Rotation(size=32))
    rotated = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(rotated, quantizer))
    export_onnx(rotated, tmp_path / "rotated.onnx", (x,))
    assert sqnr(run(str(tmp_path / "rotated.onnx"), x)[0], rotated(x)) > 20


@pytest.mark.compiled
def test_one_function_for_each_spec(tmp_path):
    _, written = exported_to(
        tmp_path / "net.onnx", nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.randn(2, 64),)
    )
    assert len([node for node in written.graph.node if node.domain == DOMAIN]) == 8
    assert len(written.functions) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8"])
def test_every_node_of_minilm(recipe, minilm, tmp_path):
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(minilm.program.module(), MXQuantizer.from_recipe(recipe)))
    export_onnx(converted, tmp_path / "net.onnx", minilm.args, minilm.shapes)
    written = onnx.load(tmp_path / "net.onnx")
    names = [value.name for value in written.graph.input]
    wrong = differences(written, {name: x.numpy() for name, x in zip(names, minilm.inputs, strict=True)})
    assert len(wrong) == 81 and not any(wrong.values())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8"])
def test_every_node_of_resnet50(recipe, tmp_path):
    model, inputs = import_extra("torchvision", "vision").models.resnet50(), (torch.randn(2, 3, 96, 96),)
    converted, written = exported_to(tmp_path / "net.onnx", model, inputs, recipe, ({0: BATCH},))
    wrong = differences(written, {written.graph.input[0].name: inputs[0].numpy()})
    assert len(wrong) == 104 and not any(wrong.values())
    assert sqnr(run(written, *inputs)[0], converted(*inputs)) > 30


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 32)

    def forward(self, x, others):
        y = self.linear(x)
        return {"logits": y, "x": torch.cat([y, y]), "parts": [others["bias"] + 1, None]}


def dims_of(path, model, *arguments):
    """Export a model, and return the dimensions of the file's inputs and outputs by name."""
    export_onnx(model, path, *arguments)
    graph = onnx.load(path).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


@pytest.mark.compiled
def test_outputs_and_dimensions_keep_their_names(tmp_path):
    inputs = (torch.randn(4, 64), {"bias": torch.randn(6, 2)})
    for shapes in (({0: BATCH}, {"bias": {0: SEQUENCE}}), {"x": {0: BATCH}, "others": {"bias": {0: SEQUENCE}}}):
        converted = convert(Named().eval(), inputs, MXQuantizer.from_recipe("mxfp8"), shapes=shapes)
        dims = dims_of(tmp_path / "named.onnx", converted, inputs, shapes)
        # an output that has the key of an input gets another name
        assert dims == {
            "x": ["batch", 64],
            "others_bias": ["sequence", 2],
            "logits": ["batch", 32],
            "x_1": ["2*batch", 32],
            "parts_0": ["sequence", 2],
        }
    pt2mx.save_program(torch.export.export(converted, inputs, dynamic_shapes=shapes), tmp_path / "named.pt2")
    assert dims_of(tmp_path / "named.onnx", pt2mx.load_program(tmp_path / "named.pt2")) == dims


@pytest.mark.compiled
def test_saved_dimensions_keep_their_names_beside_others_that_export_infers(tmp_path):
    inputs, shapes = (torch.randn(3, 6, 64),), ({0: BATCH, 1: Dim.AUTO},)  # an even length has no Dim
    # (B, S, 64) -> (B, S / 2, 32)
    pairs = module_of(
        lambda self, x: self.linear(x).unflatten(1, (x.shape[1] // 2, 2)).sum(2), linear=nn.Linear(64, 32)
    )
    converted = convert(pairs.eval(), inputs, MXQuantizer.from_recipe("mxfp8"), shapes=shapes)
    pt2mx.save_program(torch.export.export(converted, inputs, dynamic_shapes=shapes), tmp_path / "pairs.pt2")
    dims = dims_of(tmp_path / "pairs.onnx", pt2mx.load_program(tmp_path / "pairs.pt2"))
    assert [sizes[0] for sizes in dims.values()] == ["batch", "batch"]
    assert "batch" not in dims["x"][1] and dims["x"][1] != 6


def test_dimensions_keep_their_names_beside_equal_ones_without_a_name(tmp_path):
    inputs = torch.randn(3, 5, 64), torch.randn(3, 5, 64)
    named, free = {0: BATCH, 1: SEQUENCE}, {0: Dim.AUTO, 1: Dim.AUTO}
    net = module_of(lambda self, x, y: self.linear(x) + self.linear(y), linear=nn.Linear(64, 32))
    converted = convert(net.eval(), inputs, MXQuantizer.from_recipe("mxfp8"), shapes=(named, free))
    dims = dims_of(tmp_path / "sum.onnx", converted, inputs, (named, free))
    assert dims["x"] == dims["y"] == ["batch", "sequence", 64]
