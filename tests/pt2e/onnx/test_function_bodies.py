import re

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import pt2mx
from pt2mx import MXError, MXSpec, parse
from pt2mx.kernels.packing import group_of
from pt2mx.modes import FLOAT_SCALE_MODES, SCALE_MODES
from pt2mx.pt2e.onnx.files import from_torch
from pt2mx.pt2e.onnx.function_bodies import add_bodies, dequantize, fake_quantize
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX
from tests.compare import differing, same
from tests.float_scale_operators import NAMES, values
from tests.onnx_nodes import DTYPES, model_of, operator, run
from tests.oracle import modes_of
from tests.random_values import random_values

ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "int8_full", "int4")
#: more bits, fewer bits, other splits, and no mantissa bits
OTHERS = ("int16", "int2", "fp8_e4m3_finite", "fp8_e1m6", "fp8_e7m0", "fp16_e5m10", "fp4_e3m0", "fp16_e7m8")
TYPES = {dtype: data_type for data_type, dtype in DTYPES.items()}


def adversarial(rows: int) -> torch.Tensor:
    """Return (rows, 32) values of every kind, such as ties and their neighbours, zeros of both signs, Inf and NaN."""
    torch.manual_seed(rows)
    kinds = [random_values((rows // 8, 32), torch.float32, kind) for kind in range(5)]
    ties = torch.randint(-256, 257, (rows // 8, 32)) / 64 * 2.0 ** torch.randint(-149, 127, (rows // 8, 1))
    neighbours = (ties.view(torch.int32) + torch.randint(-1, 2, ties.shape, dtype=torch.int32)).view(torch.float32)
    x = torch.cat([*kinds, ties, neighbours, torch.randn(rows // 8, 32)])
    for row, value in enumerate((0.0, -0.0, 2.0**-149, torch.finfo(torch.float32).max, torch.nan, torch.inf)):
        x[row::97, row] = value
        x[40 + row] = value
    return x


def nodes_of(element: str, block_size: int = 32, axis: int = -1, length: int = -1) -> list[onnx.NodeProto]:
    """Return a node of each scale mode and rounding."""
    modes = [mode for mode in modes_of(element) if not SCALE_MODES[mode].searches]
    each = [
        FakeQuantizeMX(MXSpec(element, block_size, axis, mode, rounding), length)
        for mode in modes
        for rounding in ("even", "half_away")
    ]
    return [node.make(["X"], f"Y{i}") for i, node in enumerate(each)]


def spec_of(node: onnx.NodeProto) -> FakeQuantizeMX:
    attributes = FakeQuantizeMX.of(node)
    assert attributes is not None
    return attributes


@pytest.mark.diagonal
@pytest.mark.parametrize("opset", [18, 20, 25])
@pytest.mark.parametrize("element", [*ELEMENTS, *OTHERS])
def test_fake_quantize_gives_the_bits_of_adversarial_values(element, opset):
    x = adversarial(3200)  # 102,400 values a spec
    nodes = nodes_of(element, length=32)
    outputs = run(model_of(nodes, {"X": (TensorProto.FLOAT, [None, 32])}, opset), x)
    wrong = {}
    for node, y in zip(nodes, outputs, strict=True):
        said = spec_of(node)
        wrong[said.spec.scale_mode, said.spec.rounding] = int(differing(y, operator(said, x)).sum())
    assert len(wrong) == len(nodes) and not any(wrong.values()), wrong


SHAPES = [
    ((6, 64), -1, 32),
    ((6, 33), -1, 32),
    ((6, 7), -1, 32),
    ((2, 96, 5, 3), 1, 32),
    ((2, 37, 5), 1, 16),
    ((70, 4), 0, 32),
    ((5, 3), 0, 32),
    ((100,), -1, 32),
    ((2, 3, 50, 4), 2, 7),
    ((4, 6), -1, 1),
    ((), -1, 32),
]


@pytest.mark.parametrize(
    ("shape", "axis", "block_size", "static"), [(*s, True) for s in SHAPES] + [(*s, False) for s in SHAPES[:-1]]
)
def test_any_axis_and_length(shape, axis, block_size, static):
    torch.manual_seed(0)
    x = torch.randn(shape) * 2.0 ** torch.randint(-4, 5, shape)
    length = (x.shape[axis] if shape else 1) if static else -1
    nodes = [
        FakeQuantizeMX(MXSpec(e, block_size, axis), length).make(["X"], e) for e in ("fp8_e4m3", "fp4_e2m1", "int8")
    ]
    model = model_of(nodes, {"X": (TensorProto.FLOAT, [None] * len(shape))})
    for node, y in zip(nodes, run(model, x), strict=True):
        assert same(y, operator(spec_of(node), x).reshape(shape))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((0, 64), -1), ((2, 0, 33), -1), ((0, 64, 5), 1), ((2, 40, 0), 1), ((3, 0), -1), ((2, 0, 4), 1)],
)
def test_empty_tensors(shape, axis, static):
    length = shape[axis] if static else -1
    x = torch.randn(shape)
    nodes = [FakeQuantizeMX(MXSpec("fp8_e4m3", axis=axis), length).make(["X"], "Y")]
    inputs, feeds = {"X": (TensorProto.FLOAT, [None] * len(shape))}, [x]
    for element in ("fp8_e4m3", "fp6_e3m2", "fp4_e2m1") if static or shape[axis] % 4 == 0 else ():
        scale, data = torch.ops.pt2mx.quantize_mx(x, element, 32, axis, "floor", "even")
        nodes.append(
            DequantizeMX(MXSpec(element, axis=axis), length).make([f"{element}_data", f"{element}_scale"], element)
        )
        inputs |= {f"{element}_{name}": (TensorProto.UINT8, [None] * len(shape)) for name in ("data", "scale")}
        feeds += [data, scale]
    assert {tuple(y.shape) for y in run(model_of(nodes, inputs), *feeds)} == {shape}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("element", ["fp8_e4m3", "fp6_e3m2", "fp4_e2m1"])
def test_weights_of_several_widths_share_a_function_where_no_rank_is_known(element, known):
    nodes, inputs, feeds, expected = [], {}, [], []
    for width in (64, 128):
        scale, data = torch.ops.pt2mx.quantize_mx(torch.randn(3, width), element, 32, -1, "floor", "even")
        node = DequantizeMX(MXSpec(element), width)
        nodes.append(node.make([f"codes{width}", f"scale{width}"], f"Y{width}"))
        shape = [None, None] if known else None
        inputs |= {f"{name}{width}": (TensorProto.UINT8, shape) for name in ("codes", "scale")}
        feeds += [data, scale]
        expected.append(operator(node, data, scale))
    model = model_of(nodes, inputs)
    assert len(model.functions) == 1 + known
    assert all(same(y, want) for y, want in zip(run(model, *feeds), expected, strict=True))


def test_axes_counted_from_the_end_have_functions_of_their_own():
    nodes = [FakeQuantizeMX(MXSpec("int8", axis=axis)).make(["X"], str(axis)) for axis in (-1, -2)]
    x = torch.randn(40, 40)
    model = model_of(nodes, {"X": (TensorProto.FLOAT, [None, None])})
    for axis, y in zip((-1, -2), run(model, x), strict=True):
        assert same(y, pt2mx.fake_quantize_mx(x, "mxint8", axis=axis))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    x = adversarial(800).to(dtype)
    nodes = [helper.make_node("Cast", ["X"], ["narrow"], to=TYPES[dtype])]
    for element in ELEMENTS:
        nodes.append(FakeQuantizeMX(MXSpec(element), 32).make(["narrow"], element))
        nodes.append(helper.make_node("Cast", [element], [f"{element}_float"], to=TensorProto.FLOAT))
    model = model_of(nodes, {"X": (TensorProto.FLOAT, [None, 32])})
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=f"{element}_float") for element in ELEMENTS)
    for element, y in zip(ELEMENTS, run(model, x.float()), strict=True):
        assert same(y, pt2mx.fake_quantize_mx(x, MXSpec(element)).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("element", [*ELEMENTS, "int2", "fp8_e4m3_finite", "fp5_e2m2"])
def test_dequantize_gives_the_bits_of_every_code_and_scale(element, dtype):
    codes, size = group_of(pt2mx.ELEMENTS[element].bits)
    count = 32 * 8 * size
    data = (torch.arange(count) * 37 % 256).to(torch.uint8).repeat(256, 1)
    data[1::2] = data[1::2].flip(1)
    length = count // size * codes
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, length // 32)
    node = DequantizeMX(MXSpec(element), length, TYPES[dtype])
    model = model_of([node.make(["codes", "scale"], "Y")], packed_inputs(2))
    assert same(run(model, data, scale)[0], operator(node, data, scale))


def packed_inputs(rank: int) -> dict[str, tuple[int, list]]:
    return {name: (TensorProto.UINT8, [None] * rank) for name in ("codes", "scale")}


@pytest.mark.diagonal
@pytest.mark.parametrize("element", ["fp8_e5m2", "fp6_e3m2", "fp4_e2m1", "int8"])
@pytest.mark.parametrize(("shape", "axis", "block_size"), SHAPES[:-1])
def test_dequantize_of_any_axis_and_length(shape, axis, block_size, element):
    torch.manual_seed(0)
    scale, data = torch.ops.pt2mx.quantize_mx(torch.randn(shape), element, block_size, axis, "floor", "even")
    node = DequantizeMX(MXSpec(element, block_size, axis), shape[axis])
    model = model_of([node.make(["codes", "scale"], "Y")], packed_inputs(len(shape)), 21)
    assert same(run(model, data, scale)[0], operator(node, data, scale))


def test_dequantize_of_a_dynamic_length():
    scale, data = torch.ops.pt2mx.quantize_mx(torch.randn(3, 40), "fp6_e2m3", 32, -1, "floor", "even")
    node = DequantizeMX(MXSpec("fp6_e2m3"))
    model = model_of([node.make(["codes", "scale"], "Y")], packed_inputs(2))
    assert same(run(model, data, scale)[0], operator(node, data, scale))


def test_distinct_specs_have_distinct_functions_and_equal_ones_share_theirs():
    specs = [FakeQuantizeMX(MXSpec("fp8_e4m3"), n) for n in (64, 128, 70, 20, -1)]
    specs += [FakeQuantizeMX(MXSpec("fp8_e4m3", axis=1), n) for n in (64, 128)]
    model = model_of([spec.make(["X"], f"Y{i}") for i, spec in enumerate(specs)], {"X": (1, None)})
    names = [function.name for function in model.functions]
    blocks = ("b32", "b32_n70", "b20", "b32_any", "b32_n64_axis1", "b32_n128_axis1")
    assert names == [f"FakeQuantizeMX.fp8_e4m3_floor_even_{name}_float" for name in blocks]
    assert [FakeQuantizeMX.of(node) for node in model.graph.node] == specs
    assert [function.name for function in add_bodies(model).functions] == names


def test_nodes_in_branches_get_functions():
    branches = {
        f"{name}_branch": helper.make_graph(
            [FakeQuantizeMX(MXSpec("int8", rounding=rounding), 64).make(["X"], name)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 64])],
        )
        for name, rounding in (("then", "even"), ("else", "half_away"))
    }
    inputs = {"X": (TensorProto.FLOAT, [None, 64]), "condition": (TensorProto.BOOL, [])}
    model = model_of([helper.make_node("If", ["condition"], ["Y"], **branches)], inputs)
    x = torch.randn(3, 64)
    for condition, rounding in ((True, "even"), (False, "half_away")):
        want = pt2mx.fake_quantize_mx(x, MXSpec("int8", rounding=rounding))
        assert same(run(model, x, np.asarray(condition))[0], want)


def test_reference_evaluator_gives_the_same_bits():
    x = torch.randn(4, 64) * 3
    nodes = [FakeQuantizeMX(MXSpec(element), 64).make(["X"], element) for element in ("fp4_e2m1", "fp6_e3m2", "int8")]
    model = model_of(nodes, {"X": (TensorProto.FLOAT, [None, 64])})
    for node, y in zip(nodes, ReferenceEvaluator(model).run(None, {"X": x.numpy()}), strict=True):
        assert same(torch.from_numpy(y), operator(spec_of(node), x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rounding": "stochastic"},
            "mxfp8_e4m3{32}(stochastic): ONNX files hold the scale modes floor, ceil, ",
        ),
        ({"scale_mode": "mse"}, "and the roundings even, half_away, half_up; quantize activations with those"),
        ({"scale_exp_bits": 5}, "take E8M0 scales"),
        ({"scale_format": "e4m3_f32", "scale_mode": "four_six"}, "the scale modes nearest, nearest_reciprocal, "),
        ({"scale_format": "bf16", "scale_mode": "rceil"}, "nearest_flush and the roundings even"),
        ({"block_rows": 2}, "activations in blocks of one row"),
    ],
)
def test_specs_without_a_function_are_refused(changes, message):
    with pytest.raises(MXError, match=re.escape(message)):
        fake_quantize(MXSpec("mxfp8", **changes), 18)


FLOAT_SCALES = [
    (name, mode)
    for name in NAMES
    for mode, rule in FLOAT_SCALE_MODES.items()
    if not (spec := parse(name)).scale_format.is_power_of_two
    and spec.block_rows == 1
    and mode not in ("four_six", "mse")
    and not (rule.rounds_up and spec.scale_format.bits == 16)
]


@pytest.mark.parametrize(("name", "mode"), FLOAT_SCALES)
def test_fake_quantize_with_scales_of_a_significand_gives_the_bits(name, mode):
    spec, x = parse(name, scale_mode=mode), torch.cat([values(), torch.randn(40, 70)])
    node = FakeQuantizeMX(spec, 70)
    nodes, inputs = [node.make(["X"], "Y")], {"X": (TensorProto.FLOAT, [None, 70])}
    (y,) = run(model_of(nodes, inputs), x)
    assert not differing(y, pt2mx.fake_quantize_mx(x, spec)).any()
    for t in (1.0, 1e-3, 1e-38, 0.0, torch.inf, torch.nan) if spec.scale_format.tensor else ():
        t = torch.tensor(t)
        static = model_of([node.make(["X", "t"], "Y")], {**inputs, "t": (TensorProto.FLOAT, [])})
        assert not differing(run(static, x, t)[0], pt2mx.fake_quantize_mx(x, spec, tensor_scale=t)).any()


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_in_every_scale_format(name):
    spec, x = parse(name), values()
    t = {"t": pt2mx.tensor_scale_mx(x, spec)} if spec.scale_format.tensor else {}
    scale, codes = pt2mx.quantize_mx(x, spec, tensor_scale=t.get("t"))
    node = DequantizeMX(spec, 70).make(["c", "s", *t], "Y")
    model = model_of([node], {})
    model.graph.initializer.extend(from_torch(value, name) for name, value in {"c": codes, "s": scale, **t}.items())
    (y,) = run(model)
    assert not differing(y, pt2mx.dequantize_mx(codes, scale, spec, length=70, tensor_scale=t.get("t"))).any()


def test_blocks_of_several_rows_run_along_the_last_dimension():
    with pytest.raises(MXError, match="blocks of several rows along the last dimension only, not 0"):
        dequantize(parse("fp8_e4m3{2x2}(f32)", axis=0), 18)


def test_codes_of_two_bytes_are_refused():
    with pytest.raises(MXError, match="codes of int16 take two bytes"):
        dequantize(MXSpec("int16"), 18)


def test_domain_and_version():
    model = model_of([FakeQuantizeMX(MXSpec("int8")).make(["X"], "Y")], {"X": (1, [None, 64])})
    assert [(f.domain, f.opset_import[0].version) for f in model.functions] == [(DOMAIN, 18)]
    assert (DOMAIN, VERSION) in [(entry.domain, entry.version) for entry in model.opset_import]
