import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config, lower_to_aten
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.qdq import is_portable
from tests.flow import WITHOUT_PT2MX, calibrated, convert, exported, reloaded
from tests.models import module_of, projected
from tests.scaled_mm import ScaledMM
from tests.subgraph_models import Cond, NoGrad, WhileLoop, X

aten = torch.ops.aten
FORMATS = [
    *("mxfp8", "mxfp8_e5m2(rceil)", "mxfp6_e3m2(even)", "mxfp6_e2m3(ceil,half_away)", "mxfp4", "mxint8(mse)"),
    *("BFP[6|8]{64}(SN)", "nvfp4", "fp8_e4m3{32}(bf16)"),
]


class Net(nn.Module):
    """An embedding, a convolution, and linear layers, one of ragged blocks."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(20, 64), nn.Conv1d(64, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64, 70), nn.Linear(70, 9)

    def forward(self, ids):  # (B, T) -> (B, T, 9)
        h = self.table(ids)
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.down(torch.relu(self.up(h)))


IDS = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(0))


def quantizer_of(weight, activation):
    return MXQuantizer().set_global(get_default_mx_quantization_config(weight, activation, tensor_scale="dynamic"))


def program_of(model, inputs, quantizer, shapes=None):
    converted = convert(model.eval(), inputs, quantizer, shapes=shapes)
    with torch.no_grad():
        return torch.export.export(converted, inputs, dynamic_shapes=shapes)


def called(program):
    nodes = [node for graph in graph_modules(program.graph_module) for node in graph.graph.nodes]
    return {node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)}


def run(program, *inputs, **named):
    with torch.no_grad():
        return program.module()(*inputs, **named)


@pytest.mark.slow_except("mxfp8", "mxfp6_e3m2*")
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.compiled_cases("mxfp6_e3m2*")
def test_gives_the_bits_of_the_converted_model_by_core_operators(text):
    program = program_of(Net(), (IDS,), quantizer_of(text, text))
    lowered = lower_to_aten(program)
    assert {op for op in called(lowered) if op.namespace != "aten" or torch.Tag.core not in op.tags} == set()
    assert torch.equal(run(lowered, IDS), run(program.run_decompositions(), IDS))
    assert torch.equal(run(lower_to_aten(program, core=False), IDS), run(program, IDS))
    assert is_portable(lowered.graph_module)


@pytest.mark.compiled
def test_weights_in_torchs_dtypes():
    quantizer = quantizer_of("mxfp8", "mxfp8").set_module_name("up", get_default_mx_quantization_config("mxint8", None))
    quantizer.set_module_name("down", get_default_mx_quantization_config("mxfp4", None))
    quantizer.set_module_name("conv", get_default_mx_quantization_config("nvfp4", None))
    lowered = lower_to_aten(program_of(Net(), (IDS,), quantizer))
    stored = {name: tensor.dtype for name, tensor in lowered.state_dict.items() if "bias" not in name}
    assert stored == {
        "table.weight_data": torch.float8_e4m3fn,
        "table.weight_scale": torch.float8_e8m0fnu,
        "up.weight_data": torch.int8,
        "up.weight_scale": torch.float8_e8m0fnu,
        "down.weight_data": torch.uint8,
        "down.weight_scale": torch.float8_e8m0fnu,
        "conv.weight_data": torch.uint8,
        "conv.weight_scale": torch.float8_e4m3fn,
        "conv.weight_tensor_scale": torch.float32,
    }


@pytest.mark.compiled_cases("mxint8")
@pytest.mark.slow_except("mxint8")
@pytest.mark.parametrize("text", ["mxfp8", "mxint8", "mxfp4", "mxfp6", "nvfp4"])
def test_weights_as_bytes_in_forms_that_compilers_take(text):
    program = program_of(Net(), (IDS,), quantizer_of(text, text))
    lowered = lower_to_aten(program, weights="bytes")
    stored = {t.dtype for name, t in lowered.state_dict.items() if name.endswith(("_data", "_scale"))}
    assert stored == ({torch.uint8, torch.float32} if text == "nvfp4" else {torch.uint8})
    assert torch.equal(run(lowered, IDS), run(program.run_decompositions(), IDS))
    assert not {aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar} & called(lowered)
    for node in lowered.graph.find_nodes(op="call_function", target=aten.pow.Scalar):
        assert node.args[1].meta["val"].is_floating_point()
    for node in lowered.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        assert {index.meta["val"].dtype for index in node.args[1] if index is not None} == {torch.int64}


@pytest.mark.compiled
def test_batch_norms_with_weights_as_bytes():
    """IREE refuses this core operator."""
    norm = nn.BatchNorm2d(8)
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var)
    x = torch.randn(2, 8, 5, 5)
    program = program_of(nn.Sequential(norm, nn.ReLU(), nn.Conv2d(8, 4, 3)), (x,), "mxfp4_weight_only")
    norms = aten._native_batch_norm_legit_no_training.default
    assert norms in called(lower_to_aten(program))
    lowered = lower_to_aten(program, weights="bytes")
    assert {op for op in called(lowered) if torch.Tag.core not in op.tags} | {norms} & called(lowered) == set()
    torch.testing.assert_close(run(lowered, x), run(program, x), rtol=1e-5, atol=1e-5)


def tied(self, ids):
    h = self.table(ids)
    return nn.functional.linear(h, self.table.weight), h @ self.table.weight.t()


def test_tied_weights_and_transposed_ones():
    """The table and the layer share codes and scales; those of the product run along the other dimension."""
    program = program_of(module_of(tied, table=nn.Embedding(20, 64)), (IDS,), "mxfp8")
    lowered = lower_to_aten(program)
    stored = sorted((tuple(t.shape), t.is_contiguous(), t.dtype) for t in lowered.state_dict.values())
    assert stored == [
        ((2, 20), False, torch.float8_e8m0fnu),
        ((20, 2), True, torch.float8_e8m0fnu),
        ((20, 64), True, torch.float8_e4m3fn),
        ((64, 20), False, torch.float8_e4m3fn),
    ]
    for y, expected in zip(run(lowered, IDS), run(program, IDS), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.compiled_cases("*mxfp4(mse)")
@pytest.mark.parametrize("text", ["mxfp8", "mxfp4(mse)", pytest.param("nvfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("matmul", ["dequantize", "scaled_mm"])
def test_blocks_that_are_not_finite_and_tiny_ones(text, matmul):
    x = torch.randn(5, 64)
    program = program_of(nn.Linear(64, 16), (x,), quantizer_of(text, text))
    x[0, 3], x[1, 40], x[2, 0] = float("nan"), float("inf"), -0.0
    x[3] *= 2.0**-127
    lowered = lower_to_aten(program, matmul=matmul)
    with ScaledMM():
        y, expected = run(lowered, x), run(program, x)
    tolerance = 1e-6 if matmul == "scaled_mm" else 0
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def attention_forward(self, x):  # (B, T, 32) -> (B * T, 32)
    """A view of the result of attention, as GPT-2 has it: `run_decompositions()` of torch 2.13 refuses its strides."""
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind()
    y = nn.functional.scaled_dot_product_attention(q, k, v)  # (B, 2, T, 16)
    return self.out(y.transpose(1, 2).reshape(*x.shape).view(-1, 32))


@pytest.mark.compiled
def test_attention_keeps_the_order_of_its_memory():
    x = torch.randn(3, 5, 32)
    program = program_of(module_of(attention_forward, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32)), (x,), "mxfp8")
    lowered = lower_to_aten(program)
    assert {op for op in called(lowered) if torch.Tag.core not in op.tags} == set()
    assert aten.squeeze.dims not in called(lowered)  # which IREE refuses, and `unbind` calls
    torch.testing.assert_close(run(lowered, x), run(program, x), rtol=0.05, atol=0.05)


def norm_forward(self, x):
    """A batch norm along the last dimension, as of PatchTST, whose kernel gives another order than its input has."""
    return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_batch_norms_keep_the_order_of_their_memory():
    x = torch.randn(2, 4, 32)
    program = program_of(
        module_of(norm_forward, norm=nn.BatchNorm1d(32), linear=nn.Linear(32, 32)), (x,), quantizer_of("mxfp8", "mxfp8")
    )
    assert torch.equal(run(pt2mx.lower_to_aten(program), x), run(program, x))


@pytest.mark.compiled
@pytest.mark.slow_cases("mxfp4")
@pytest.mark.parametrize("text", ["mxfp8", "mxfp4"])
def test_takes_the_sizes_that_the_program_takes(text):
    shapes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=600)},)
    program = program_of(projected(), (torch.randn(3, 33, 40),), quantizer_of(text, text), shapes)
    lowered = lower_to_aten(program)
    assert sorted(map(str, lowered.range_constraints.values())) == sorted(map(str, program.range_constraints.values()))
    for sizes in ((1, 1), (2, 31), (5, 32), (4, 65)):
        x = torch.randn(*sizes, 40)
        torch.testing.assert_close(run(lowered, x), run(program, x), rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
@pytest.mark.slow_cases("WhileLoop-*")
@pytest.mark.parametrize("matmul", ["dequantize", "scaled_mm"])
@pytest.mark.parametrize("kind", [NoGrad, Cond, WhileLoop], ids=lambda kind: kind.__name__)
def test_subgraphs(kind, matmul):
    program = program_of(kind(), (X,), "mxfp8")
    lowered = lower_to_aten(program, matmul=matmul)
    assert {op.namespace for op in called(lowered)} == {"aten"}
    for x in (X, -X):
        with ScaledMM():
            torch.testing.assert_close(run(lowered, x), run(program, x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_decoder_with_its_cache():
    from tests.language_models import decoder_by_recipe

    program = decoder_by_recipe("mxfp8", "llama").program
    lowered = lower_to_aten(program, core=False)
    args, kwargs = program.example_inputs
    outputs, caches = [], []
    for run_program in (program, lowered):
        given = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
        with torch.no_grad():
            outputs.append(run_program.module()(*given[0], **given[1]))
        caches.append(torch.utils._pytree.tree_leaves(given))
    for ours, theirs in ((outputs[1], outputs[0]), (caches[1], caches[0])):
        for y, expected in zip(*map(torch.utils._pytree.tree_leaves, (ours, theirs)), strict=True):
            assert not isinstance(y, torch.Tensor) or torch.equal(y, expected)


@pytest.mark.compiled
def test_loads_where_pt2mx_is_not_installed(tmp_path, run_python):
    """A dynamic batch, and packed codes with two scales; subgraphs."""
    shapes = ({0: torch.export.Dim("batch")},)
    cases = {
        "dynamic": (nn.Linear(70, 16), torch.randn(3, 70), quantizer_of("nvfp4", "mxfp8"), shapes),
        "inner": (Cond(), X, "mxfp6", None),
    }
    for name, (model, x, quantizer, dynamic) in cases.items():
        lowered = lower_to_aten(program_of(model, (x,), quantizer, dynamic))
        torch.export.save(lowered, tmp_path / f"{name}.pt2")
        x = x if dynamic is None else torch.randn(5, 70)
        torch.save((x, run(lowered, x)), tmp_path / f"{name}.pt")
    assert run_python(WITHOUT_PT2MX, list(cases), cwd=tmp_path, fresh=True).split() == ["True", "True"]


SCALED = {
    "mxfp8": ("mxfp8", "mxfp8", torch.float32, aten._scaled_mm.default),
    "mxfp8 e5m2": ("mxfp8_e5m2", "mxfp8(mse)", torch.bfloat16, aten._scaled_mm.default),
    "mxfp4": ("mxfp4", "mxfp4", torch.float32, aten._scaled_mm.default),
    "fp4 in 16": ("fp4_e2m1{16}(e4m3)", "fp4_e2m1{16}(e4m3)", torch.float32, aten._scaled_mm.default),
    "nvfp4": ("nvfp4", "nvfp4", torch.bfloat16, aten._scaled_mm_v2.default),
}


def layers(self, x):  # (B, T, 160) -> (B, T, 144), (B, T, 32), (B, T, 48)
    """A linear layer with and one without a bias, and a product with the transpose of a parameter."""
    return self.up(x), self.down(x), x @ self.weight


@pytest.mark.slow_except("mxfp8")
@pytest.mark.parametrize("case", SCALED)
def test_scaled_matmuls_equal_up_to_the_rounding_of_sums(case):
    weight, activation, dtype, operator = SCALED[case]
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    torch.manual_seed(0)
    x = torch.randn(3, 5, 160, dtype=dtype)
    model = module_of(layers, up=nn.Linear(160, 144), down=nn.Linear(160, 32, bias=False))
    model.weight = nn.Parameter(torch.randn(160, 48))
    program = program_of(model.to(dtype), (x,), quantizer_of(weight, activation), shapes)
    lowered = lower_to_aten(program, matmul="scaled_mm")
    assert len(lowered.graph.find_nodes(op="call_function", target=operator)) == 3
    assert {op for op in called(lowered) if torch.Tag.core not in op.tags} <= {operator, aten.view.dtype}
    for batch in (3, 1, 2):
        with ScaledMM():
            results = run(lowered, x[:batch])
        for y, expected in zip(results, run(program, x[:batch]), strict=True):
            tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)


@pytest.mark.compiled
def test_a_scaled_matmul_is_exact_where_its_sums_are():
    x, layer = torch.randint(-4, 5, (2, 64)).float(), nn.Linear(64, 16)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-4, 5, (16, 64)))
    for text in ("mxfp8", "mxfp4"):
        program = program_of(layer, (x,), quantizer_of(text, text))
        lowered = lower_to_aten(program, matmul="scaled_mm")
        assert reloaded_if_saved(lowered, text).graph is not None
        with ScaledMM():
            assert torch.equal(run(lowered, x), run(program, x))


def reloaded_if_saved(program, text):
    """torch.export (2.13) saves no tensor of float4_e2m1fn_x2."""
    return program if text == "mxfp4" else reloaded(program)


#: formats of the weight and the activation, and the layer's sizes
UNSCALED = [
    ("mxfp8", None, (64, 16)),
    ("mxfp8", "mxfp4", (64, 16)),
    ("mxfp6", "mxfp6", (64, 16)),
    ("mxfp8", "mxfp8", (70, 16)),
    ("mxfp8", "mxfp8", (64, 9)),
    ("mxfp8", "mxfp8", (0, 16)),
    ("mxfp8_e5m2", "mxfp8_e5m2", (64, 16)),
]


class Unscaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for *_, sizes in UNSCALED)

    def forward(self, x):
        return [layer(x[:, : layer.in_features]) for layer in self.layers]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_has_no_scaled_form_is_dequantized():
    x, quantizer = torch.randn(2, 70), MXQuantizer()
    for i, (weight, activation, _) in enumerate(UNSCALED):
        quantizer.set_module_name(f"layers.{i}", get_default_mx_quantization_config(weight, activation))
    program = program_of(Unscaled(), (x,), quantizer)
    lowered = lower_to_aten(program, matmul="scaled_mm")
    assert not {aten._scaled_mm.default, aten._scaled_mm_v2.default} & called(lowered)
    for y, expected in zip(run(lowered, x), run(program, x), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.compiled
def test_the_program_does_not_change():
    program = program_of(nn.Linear(64, 16), (torch.randn(2, 64),), "mxfp8")
    before = str(program), {name: tensor.dtype for name, tensor in program.state_dict.items()}
    for matmul in ("dequantize", "scaled_mm"):
        lower_to_aten(program, matmul=matmul)
    assert (str(program), {name: tensor.dtype for name, tensor in program.state_dict.items()}) == before


def test_refusals():
    x = torch.randn(2, 64)
    program = program_of(nn.Linear(64, 8), (x,), "mxfp8")
    prepared = calibrated(exported(nn.Linear(64, 8).eval(), x), MXQuantizer.from_recipe("mxfp8"), x)
    lowered = torch.export.export(pt2mx.lower_to_inductor(convert(nn.Linear(64, 8), (x,), "mxfp8")), (x,))
    for given, options, message in (
        (program.module(), {}, "expected an ExportedProgram, not GraphModule"),
        (torch.export.export(nn.Linear(64, 8), (x,)), {}, "not one without quantized tensors"),
        (torch.export.export(prepared, (x,)), {}, "not one with observers, of a prepared model"),
        (lower_to_aten(program), {}, "not a portable program, whose operators are written out"),
        (lowered, {}, "pt2mx.linear_mx.default of 'linear.*' is an operator of a lowered model"),
        (program, {"matmul": "scaled"}, "unknown matmul='scaled': did you mean 'scaled_mm'"),
        (program, {"weights": "byte"}, "unknown weights='byte': did you mean 'bytes'"),
        (program, {"matmul": "scaled_mm", "weights": "bytes"}, "matmul='scaled_mm' takes weights='native'"),
    ):
        with pytest.raises(MXError, match=message):
            lower_to_aten(given, **options)


def integers(self, x, i):  # i: (8,) int64
    """Calls that compilers lack and lowering rewrites, beside a layer."""
    powers = 2.0**i, 2 ** (i > 0), 2 ** (i.abs() * 20)
    bits = (i > 0) | 1, (i > 0) ^ True, i.to(torch.uint8) | 0x80
    return *powers, *bits, i << 3, i >> i.abs(), i[i.abs().int()], i.sum().squeeze((0,)), self.linear(x)


@pytest.mark.compiled
def test_integers_of_the_model_keep_their_values():
    x, i = torch.randn(2, 64), torch.arange(-3, 5)
    program = program_of(module_of(integers, linear=nn.Linear(64, 16)), (x, i), "mxfp8")
    for y, expected in zip(run(lower_to_aten(program), x, i), run(program, x, i), strict=True):
        assert y.dtype == expected.dtype and torch.equal(y, expected)


def experts(self, x, offs):  # (T, 32), (3,) int32 -> (T, 16)
    """The rows of each expert by its weight."""
    return torch._grouped_mm(x, self.weight.to(x.dtype), offs=offs)


@pytest.mark.compiled
def test_experts_multiply_all_rows():
    x, offs = torch.randn(9, 32, dtype=torch.bfloat16), torch.tensor([2, 2, 9], dtype=torch.int32)
    program = program_of(module_of(experts, weight=nn.Parameter(torch.randn(3, 32, 16))).bfloat16(), (x, offs), "mxfp8")
    lowered = lower_to_aten(program)
    assert {op for op in called(lowered) if torch.Tag.core not in op.tags} == set()
    torch.testing.assert_close(run(lowered, x, offs), run(program, x, offs))


@torch.library.custom_op("pt2mx_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def custom(self, x):
    return self.act(self.linear(x))


@pytest.mark.compiled
def test_a_custom_operator_is_named_with_its_module():
    x = torch.randn(2, 64)
    act = module_of(lambda self, x: doubled(x))
    program = program_of(module_of(custom, linear=nn.Linear(64, 16), act=act), (x,), "mxfp8")
    with pytest.raises(MXError, match=r"pt2mx_tests\.doubled\.default of 'act' has no form in core ATen operators"):
        lower_to_aten(program)
    assert torch.equal(run(lower_to_aten(program, core=False), x), run(program, x))


def test_a_program_without_example_inputs_is_refused():
    program = program_of(nn.Linear(64, 16), (torch.randn(2, 64),), "mxfp8")
    program.example_inputs = None
    with pytest.raises(MXError, match="the program has no example inputs"):
        lower_to_aten(program)
