"""Programs for ExecuTorch, up to the edge: executorch itself is not needed."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.pt2e.executorch.edge import BESIDE_CORE, edge_ready
from tests.flow import calibrated, convert, exported

BATCH = ({0: torch.export.Dim("batch", max=16)},)


class Net(nn.Module):
    """Embedding, convolution, attention and linear layers; 70 values make a ragged block."""

    def __init__(self):
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(50, 64), nn.Conv1d(64, 64, 3, padding=1), nn.LayerNorm(64)
        self.qkv, self.up, self.down = nn.Linear(64, 192), nn.Linear(64, 70), nn.Linear(70, 9)

    def forward(self, ids):  # (B, T) -> (B, T, 9)
        h = self.table(ids)
        h = h + torch.relu(self.conv(h.transpose(1, 2))).transpose(1, 2)
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.down(nn.functional.gelu(self.up(h + attended)))


def converted_program(model, x, quantizer, shapes=None):
    converted = convert(model, (x,), quantizer, shapes=shapes)
    with torch.no_grad():
        return torch.export.export(converted, (x,), dynamic_shapes=shapes)


def operators(program):
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


def check(model, inputs, recipe):
    """inputs: (batch, ...), with a dynamic batch."""
    program = converted_program(model.eval(), inputs[:3], recipe, BATCH)
    ready = edge_ready(program)
    for batch in (1, 3, 5):
        with torch.no_grad():
            assert torch.equal(ready.module()(inputs[:batch]), program.module()(inputs[:batch]))
    aten = {op for op in operators(ready) if isinstance(op, torch._ops.OpOverload)}
    assert {op.namespace for op in aten} == {"aten"} and torch.ops.aten.view.dtype not in aten
    others = {op for op in aten if torch.Tag.core not in op.tags} - {*BESIDE_CORE}
    assert not {op for op in others if "shift" in str(op) or "view" in str(op)}, others


def test_gives_the_bits_of_the_program_without_its_operators():
    check(nn.Sequential(nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 9)), torch.randn(5, 70), "mxfp6")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp6", "mxfp4_weights_mxfp8_activations", "mxint8"])
def test_embeddings_convolutions_and_attention(recipe):
    check(Net(), torch.randint(0, 50, (5, 12)), recipe)


def test_weights_stay_bytes():
    ready = edge_ready(converted_program(nn.Linear(64, 8).eval(), torch.randn(2, 64), "mxfp4"))
    stored = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ready.state_dict.items()}
    assert stored == {
        "bias": (torch.float32, (8,)),
        "weight_data": (torch.uint8, (8, 32)),
        "weight_scale": (torch.uint8, (8, 2)),
    }
    assert len(ready.constants) == 0


@pytest.mark.compiled
@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize("activation", ["mxint8(mse)", "mxfp8(ceil,up)", "nvfp4"])
def test_blocks_that_are_not_finite_and_tiny_ones(activation):
    """Also by scale modes and scale formats that go through the arithmetic of bit casts."""
    quantizer = MXQuantizer().set_global(
        get_default_mx_quantization_config("mxfp4", activation, tensor_scale="dynamic")
    )
    program = converted_program(nn.Linear(64, 8).eval(), torch.randn(4, 64), quantizer)
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2, 0] = float("nan"), float("inf"), -0.0
    x[3] *= 2.0**-127
    with torch.no_grad():
        y, expected = edge_ready(program).module()(x), program.module()(x)
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.compiled
def test_the_program_does_not_change():
    program = converted_program(nn.Linear(64, 8).eval(), torch.randn(2, 64), "mxfp8")
    before = str(program)
    edge_ready(program)
    assert str(program) == before


def test_bounds_of_dynamic_dimensions():
    shapes = ({0: torch.export.Dim("batch")},)
    program = converted_program(nn.Linear(64, 8).eval(), torch.randn(4, 64), "mxfp8", shapes)
    before = dict(program.range_constraints)
    (bounds,) = edge_ready(program, max_size=16).range_constraints.values()
    assert bounds.upper == 16 and program.range_constraints == before
    for size in (1, True, "16"):
        with pytest.raises(MXError, match=f"max_size={size!r} must be an integer of at least 2"):
            edge_ready(program, size)
    with pytest.raises(MXError, match="could not export the program again"):
        edge_ready(program, max_size=3)  # the example has 4 rows


def test_refuses_what_is_no_converted_program():
    x = torch.randn(2, 64)
    float_program = torch.export.export(nn.Linear(64, 8).eval(), (x,))
    prepared = calibrated(exported(nn.Linear(64, 8).eval(), x), MXQuantizer.from_recipe("mxfp8"), x)
    portable = pt2mx.make_portable(converted_program(nn.Linear(64, 8).eval(), x, "mxfp8"))
    for program, message in (
        (nn.Linear(64, 8), "expected an ExportedProgram, not Linear"),
        (float_program, "not one without quantized tensors"),
        (torch.export.export(prepared, (x,)), "not one with observers, of a prepared model"),
        (portable, "not a portable program, whose operators are written out"),
    ):
        with pytest.raises(MXError, match=message):
            edge_ready(program)


aten = torch.ops.aten


@pytest.mark.compiled
def test_weights_of_one_format_share_their_tables():
    x = torch.randn(2, 64)
    ready = {
        layers: edge_ready(
            converted_program(nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).eval(), x, "mxfp4_weight_only")
        )
        for layers in (1, 3)
    }
    tables = {
        layers: len(program.graph.find_nodes(op="call_function", target=aten.arange.default))
        for layers, program in ready.items()
    }
    assert tables[1] == tables[3] == 3  # of codes, of scales, and of the shifts of two codes in a byte
    assert len(ready[3].graph.nodes) - len(ready[1].graph.nodes) < 2 * 30
