import re

import pytest
import torch
from torch import nn
from torch.export import Dim

import pt2mx
from pt2mx import MXError, MXQuantizer, export_onnx
from pt2mx.pt2e.onnx.exportable import drop_size_assertions
from tests.compare import same
from tests.flow import convert, exported, reloaded
from tests.models import module_of

X, SQUARE = (torch.randn(2, 64),), (torch.randn(64, 64),)


def linear(recipe="mxfp8", **changes):
    quantizer = MXQuantizer.from_recipe(recipe)
    if changes:
        config = pt2mx.get_default_mx_quantization_config("mxfp8", pt2mx.parse("mxfp8").replace(**changes))
        quantizer = MXQuantizer().set_global(config)
    return convert(nn.Linear(64, 8), X, quantizer)


def prepared():
    return pt2mx.prepare_pt2e(exported(nn.Linear(64, 8), *X), MXQuantizer.from_recipe("mxfp8"))


def eigenvalues():
    """An operator that torch's exporter does not translate."""
    return module_of(lambda self, x: torch.linalg.eigvalsh(self.linear(x)), linear=nn.Linear(64, 64))


class WithNumber(nn.Linear):
    def __init__(self):
        super().__init__(64, 8)

    def forward(self, x):
        return super().forward(x), 3


def counter():
    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x) * self.calls

    return module_of(forward, linear=nn.Linear(64, 8), calls=nn.Buffer(torch.zeros(())))


def test_the_model_stays_as_it_is(tmp_path):
    converted = linear()
    code, want = converted.code, converted(*X)
    export_onnx(converted, tmp_path / "net.onnx", X)
    assert converted.code == code and same(converted(*X), want)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (lambda: nn.Linear(64, 8), X, {}, "expected a converted graph module or an ExportedProgram, not Linear"),
        (lambda: exported(nn.Linear(64, 8), *X), X, {}, "not one without quantized tensors: pass what convert_pt2e"),
        (prepared, X, {}, "not one with observers, of a prepared model"),
        (linear, None, {}, "give example_inputs: a tuple of the model's inputs, or a mapping of its keyword inputs"),
        (linear, X[0], {}, "a tuple of inputs or a mapping of keyword inputs, not Tensor"),
        (linear, X, {"target": "coreml"}, "unknown target 'coreml'"),
        (linear, X, {"opset": 17}, "opset=17 must be an integer from 18 to 25"),
        (linear, X, {"opset": 26}, "opset=26 must be an integer from 18 to 25"),
        (linear, X, {"opset": 20.0}, "opset=20.0 must be an integer from 18 to 25"),
        (linear, X, {"opset": True}, "opset=True must be an integer from 18 to 25"),
        (lambda: linear(rounding="stochastic"), X, {}, "ONNX files hold the scale modes"),
        (lambda: linear(scale_mode="mse"), X, {}, "ONNX files hold the scale modes"),
        (
            lambda: convert(eigenvalues(), SQUARE),
            SQUARE,
            {},
            "No ONNX function found for <OpOverload(op='aten._linalg",
        ),
        (lambda: convert(counter(), X), X, {}, "the model writes to its buffer 'calls'"),
        (linear, (torch.randn(2, 65),), {}, "could not export the model for these inputs and dynamic shapes: Assert"),
        (linear, (*X, *X), {}, "could not export the model for these inputs and dynamic shapes: TypeError: too many"),
        (linear, X, {"dynamic_shapes": ({5: torch.export.Dim("n")},)}, "and dynamic shapes: IndexError"),
        (linear, (X[0].half(),), {}, "the input 'input' is of torch.float16, but the model was exported for torch.fl"),
        (lambda: convert(WithNumber(), X), X, {}, "the output 3 is no tensor, and an ONNX file has no other outputs"),
    ],
)
def test_bad_input_writes_nothing(model, inputs, options, message, tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"before")
    with pytest.raises(MXError, match=re.escape(message)):
        export_onnx(model(), tmp_path / "net.onnx", inputs, **options)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_a_place_where_no_file_can_be_written(tmp_path):
    with pytest.raises(MXError, match="it must be a file in a folder that exists"):
        export_onnx(linear(), tmp_path / "nowhere" / "net.onnx", X)


def test_codes_that_are_an_output_have_no_form(tmp_path):
    with pytest.raises(MXError, match=r"pt2mx\.quantize_mx\.default of 'quantize_mx' has no ONNX form"):
        codes = module_of(lambda self, x: torch.ops.pt2mx.quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even"))
        export_onnx(exported(codes, *X), tmp_path / "net.onnx", X)
    assert not list(tmp_path.iterdir())


def test_a_model_that_writes_to_an_input(tmp_path):
    class Cache(nn.Linear):
        def forward(self, x, cache):
            cache.copy_(x)
            return super().forward(x)

    args = (*X, torch.zeros(2, 64))
    converted = convert(Cache(64, 8), args)
    with pytest.raises(MXError, match=r"the model writes to its input 'cache', .* an ONNX graph writes to none"):
        export_onnx(converted, tmp_path / "cache.onnx", args)
    assert not list(tmp_path.iterdir())


class MatmulTimesNumber(nn.Module):
    """Blocks along a dynamic dimension, and a number that the model checks itself."""

    def forward(self, a, b, n):
        size = n.item()
        torch._check(size >= 2)
        return (a @ b) * size


def test_assertions_on_sizes_of_codes_go_and_others_stay():
    inputs = torch.randn(2, 40), torch.randn(40, 3), torch.tensor(3)
    shapes = ({1: Dim("k")}, {0: Dim("k")}, None)
    converted = convert(MatmulTimesNumber(), inputs, "mxfp4", shapes=shapes)
    model = reloaded(torch.export.export(converted, inputs, dynamic_shapes=shapes)).module()

    def assertions():
        return len(model.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default))

    before, expected = assertions(), model(*inputs)
    drop_size_assertions(model)
    assert before - assertions() == 4  # of codes and scales of both operands
    assert assertions() >= 1
    assert same(model(*inputs), expected)


def test_experts_are_refused_in_one_line(tmp_path):
    inputs = torch.ones(4, 32, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    experts = module_of(
        lambda self, x, ends: torch._grouped_mm(x, self.weight, ends),
        weight=nn.Parameter(torch.ones(2, 32, 16, dtype=torch.bfloat16)),
    )
    exported = torch.export.export(experts.eval(), inputs).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, MXQuantizer.from_recipe("mxfp4_weight_only")))
    with pytest.raises(MXError, match=r"the model has experts, whose matmul aten\._grouped_mm\.default") as caught:
        export_onnx(converted, tmp_path / "net.onnx", inputs)
    assert "pt2mx generate" in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
