"""Files of older versions whose schemas had defaults. These files lack arguments that equal a default."""

import json
import zipfile

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.pt2e.program.program import read_program
from tests.models import module_of

#: the defaults of the older schemas, as torch writes them
DEFAULTS = {
    "axis": {"as_int": -1},
    "block_dim": {"as_int": -1},
    "scale_mode": {"as_string": "floor"},
    "rounding": {"as_string": "even"},
    "ste": {"as_string": "identity"},
    "seed": {"as_none": True},
    "length": {"as_none": True},
    "target_dtype": {"as_none": True},
    "activation": {"as_string": "none"},
    "rotation": {"as_int": 0},
    "stride": {"as_ints": [1, 1]},
    "padding": {"as_ints": [0, 0]},
    "dilation": {"as_ints": [1, 1]},
}
X = torch.linspace(-3, 3, 2 * 64).reshape(2, 64)


class Quantized(nn.Module):
    """Call each operator that lost defaults: with usual arguments, and with another last argument."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 8)

    def forward(self, x):
        ops = torch.ops.pt2mx
        scale, data = ops.quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even")
        y = ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1)
        y = ops.fake_quantize_mx(self.fc(y), "int8", 4, -1, "floor", "even", None, "identity")
        return torch.cond(
            y.sum() > 0,
            lambda y: ops.fake_quantize_mx(y, "fp4_e2m1", 8, -1, "floor", "even", None, "identity") + 1,
            lambda y: ops.fake_quantize_mx(y, "fp4_e2m1", 8, 0, "ceil", "even", None, "identity") - 1,
            (y,),
        )


class Lowered(nn.Module):
    """Call each operator of lowered programs that lost defaults, except operators of one GPU."""

    def __init__(self):
        super().__init__()
        self.scale, self.data = pt2mx.quantize_mx(torch.randn(64, 64), "mxfp8")
        self.conv_scale, self.conv_data = pt2mx.quantize_mx(torch.randn(64, 2, 2, 64), "mxfp8")

    def forward(self, x):
        ops = torch.ops.pt2mx
        weight, conv_weight = (self.data, self.scale, None), (self.conv_data, self.conv_scale, None)
        weight, conv_weight = ((*packed, "fp8_e4m3", 32) for packed in (weight, conv_weight))
        modes = "fp8_e4m3", 32, "floor", "even"
        x = ops.rotated_fake_quantize_mx(ops.hadamard(x, 64, -1), 32, *modes)
        x = ops.linear_mx(ops.linear_mx(x, *weight, 32), *weight, 0) / 64
        x = ops.activation_fake_quantize_mx(x, "gelu", "int8", 32, "ceil", "even")
        _, x = ops.layer_norm_fake_quantize_mx(x, None, None, None, 1e-5, *modes)
        x = ops.linear_fake_quantize_mx(x, *weight, None, "relu", *modes)
        _, x = ops.conv2d_fake_quantize_mx(
            x.view(2, 1, 1, 64), *conv_weight, (1, 1), (1, 1), (1, 1), None, None, "relu", False, *modes
        )
        x = ops.conv2d_mx(x, *conv_weight, (1, 1), (1, 1), (1, 1)) / 64
        x = ops.conv2d_mx(x, *conv_weight, (1, 1), (0, 0), (1, 1)).sum((1, 2))
        data, scale, _ = ops.quantize_fp8_rows(x, "fp4_e2m1", "floor", "even", "none")
        normed, *_ = ops.layer_norm_fp8_rows(x, None, None, None, 1e-5, "fp4_e2m1", "floor", "even")
        return torch.cat([normed, data.float(), scale], -1)


def nodes(value):
    if isinstance(value, dict):
        if str(value.get("target")).startswith("torch.ops.pt2mx"):
            yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from nodes(part)


def drop_defaults(path, to, defaults=DEFAULTS):
    """Write the file as the older version did: without trailing arguments that equal a default."""
    dropped = []
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(to, "w") as old:
        for name in archive.namelist():
            record = archive.read(name)
            if "/models/" in name and name.endswith(".json"):
                graph = json.loads(record)
                for node in nodes(graph):
                    while defaults.get(node["inputs"][-1]["name"]) == node["inputs"][-1]["arg"]:
                        dropped.append(node["inputs"].pop()["name"])
                record = json.dumps(graph)
            old.writestr(name, record)
    return dropped


@pytest.fixture(scope="module", params=[Quantized, Lowered])
def model(request):
    torch.manual_seed(0)
    return request.param().eval().requires_grad_(False)


def test_arguments_that_older_files_leave_out(model, tmp_path):
    torch.export.save(torch.export.export(model, (X,)), tmp_path / "new.pt2")
    dropped = drop_defaults(tmp_path / "new.pt2", tmp_path / "old.pt2")
    lost = {
        Quantized: {"block_dim", "ste", "seed"},
        Lowered: {"rotation", "activation", "stride", "padding", "dilation"},
    }
    assert set(dropped) == {"axis", "scale_mode", "rounding"} | lost[type(model)]
    with pytest.raises((KeyError, RuntimeError)):  # in the words of torch
        torch.export.load(tmp_path / "old.pt2")
    loaded = read_program(tmp_path / "old.pt2").module()
    for x in (X, -X):
        assert torch.equal(loaded(x), model(x))


@pytest.mark.compiled_except("Lowered")
def test_torch_writes_what_decides_numbers(model, tmp_path):
    pt2mx.save_program(torch.export.export(model, (X,)), tmp_path / "ours.pt2")
    torch.export.save(torch.export.export(model, (X,)), tmp_path / "torch.pt2")
    for path in (tmp_path / "ours.pt2", tmp_path / "torch.pt2"):
        with zipfile.ZipFile(path) as archive:
            (name,) = [n for n in archive.namelist() if "/models/" in n and n.endswith(".json")]
            graph = json.loads(archive.read(name))
        for node in nodes(graph):
            written = {entry["name"] for entry in node["inputs"]}
            schema = eval(node["target"], {"torch": torch})._schema
            left_out = {a.name: a.default_value for a in schema.arguments if a.name not in written}
            assert set(left_out.values()) <= {None}
        assert torch.equal(pt2mx.load_program(path).module()(X), model(X))


@pytest.mark.parametrize(
    ("modes", "lost"),
    [
        ((None, True, None, None, "int8", 32, "floor", "even"), {"block_size", "scale_mode", "rounding"}),
        ((None, False, 0.5, None, None, 32, "floor", "even"), {"elem_dtype_name", "target_dtype", "block_size"}),
        ((None, False, None, None, None, 32, "floor", "even"), {"mask", "is_causal", "scale"}),
    ],
)
def test_attention_in_older_files(modes, lost, tmp_path):
    """All arguments of `attention_bfloat16` except the operands had defaults."""
    defaults = DEFAULTS | {"block_size": {"as_int": 32}, "is_causal": {"as_bool": False}}
    defaults |= {name: {"as_none": True} for name in ("mask", "scale", "elem_dtype_name")}
    attention, x = torch.ops.pt2mx.attention_bfloat16, torch.randn(1, 2, 8, 64)
    model = module_of(lambda self, x: attention(x, x, x, *modes))
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "new.pt2")
    assert lost <= set(drop_defaults(tmp_path / "new.pt2", tmp_path / "old.pt2", defaults))
    assert torch.equal(read_program(tmp_path / "old.pt2").module()(x), model(x))
