"""Settings of a quantizer by object type and by single call, and as dictionaries."""

import json

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFormatObserver, MXQuantizationConfig, MXQuantizer
from pt2mx.fx.graph.higher_order_ops import nodes_in_order
from pt2mx.pt2e.quantizer.settings import number_calls
from tests.models import module_of

FP8, FP4 = MXQuantizationConfig("mxfp8", "mxfp8"), MXQuantizationConfig("mxfp4", "mxfp4")
INT8 = MXQuantizationConfig("mxint8", "mxint8")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.b(self.a(self.a(x)))
        return nn.functional.linear(y @ x, x) @ x


def model_forward(self, x):
    for block in self.blocks:
        x = block(x)
    return self.head(x)


def exported(strict=False):
    model = module_of(model_forward, blocks=nn.ModuleList([Block(), Block()]), head=nn.Linear(32, 8))
    return torch.export.export(model.eval(), (torch.randn(32, 32),), strict=strict).module()


def quantized(quantizer, element, strict=False):
    """The positions, in execution order, of the operators whose first operand has this element."""
    report = pt2mx.quantization_report(pt2mx.prepare_pt2e(exported(strict), quantizer))
    operators = report.operators
    return [i for i, o in enumerate(operators) if any(p.spec and p.spec.startswith(f"mx{element}") for p in o.operands)]


# the operators: a, a, b, matmul, linear, matmul of either block, then the head
EVERY = list(range(13))


@pytest.mark.parametrize(
    ("object_type", "positions"),
    [
        (nn.Linear, [0, 1, 2, 6, 7, 8, 12]),
        ("Linear", [0, 1, 2, 6, 7, 8, 12]),
        ("torch.nn.Linear", [0, 1, 2, 6, 7, 8, 12]),
        (Block, EVERY[:12]),
        (torch.ops.aten.matmul, [3, 5, 9, 11]),
        (torch.ops.aten.matmul.default, [3, 5, 9, 11]),
        ("aten.matmul", [3, 5, 9, 11]),
        ("matmul", [3, 5, 9, 11]),
        (torch.matmul, [3, 5, 9, 11]),
        (torch.Tensor.matmul, [3, 5, 9, 11]),
        (nn.functional.linear, [0, 1, 2, 4, 6, 7, 8, 10, 12]),
    ],
)
def test_object_types_are_modules_and_operators(object_type, positions):
    quantizer = MXQuantizer().set_global(FP8).set_object_type(object_type, FP4)
    assert quantized(quantizer, "fp4") == positions


@pytest.mark.diagonal
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("module", "object_type", "index", "positions"),
    [
        ("blocks.0", nn.Linear, 0, [0]),
        ("blocks.0", nn.Linear, 1, [1]),  # the same module, called again
        ("blocks.1", "Linear", 2, [8]),
        ("", nn.Linear, 0, [12]),
        ("blocks", Block, 1, EVERY[6:12]),
        ("blocks.1", torch.ops.aten.matmul.default, 1, [11]),
        ("blocks.1", "matmul", 0, [9]),
        ("blocks.0", nn.functional.linear, 0, [4]),  # the linear operators of the layers are called by the layers
        ("blocks.0.a", "aten.linear", 1, [1]),
    ],
)
def test_one_call_of_a_module(module, object_type, index, positions, strict):
    quantizer = MXQuantizer().set_global(FP8).set_module_name_object_type_order(module, object_type, index, FP4)
    assert quantized(quantizer, "fp4", strict) == positions


def test_a_call_comes_before_a_name_and_after_the_ends():
    quantizer = MXQuantizer().set_module_name("blocks.0", FP8).set_first(INT8, 1)
    quantizer.set_module_name_object_type_order("blocks.0", nn.Linear, 0, FP4)
    quantizer.set_module_name_object_type_order("blocks.0", nn.Linear, 2, FP4)
    quantizer.set_module_name_object_type_order("blocks.0", "matmul", 0, None)
    assert (quantized(quantizer, "fp4"), quantized(quantizer, "fp8"), quantized(quantizer, "int8")) == (
        [2],
        [1, 4, 5],
        [0],
    )


def test_operators_with_small_weights():
    """Of several counts the smallest that covers a weight wins. A module comes first, an operator later."""
    quantizer = MXQuantizer().set_global(FP8).set_small_weights(FP4, 256).set_small_weights(INT8, 1024)
    assert quantized(quantizer, "fp4") == [12]  # 8 x 32
    assert quantized(quantizer, "int8") == [0, 1, 2, 6, 7, 8]  # 32 x 32; the factors of the others are computed
    quantizer.set_operator_type("aten.linear", FP8).set_module_name("head", FP8)
    assert quantized(quantizer, "fp8") == [3, 4, 5, 9, 10, 11, 12]


def test_small_weights_that_an_operator_reads_through_others():
    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda x: x @ self.b.t(), lambda x: -x @ self.b.t(), (x,))
        return x @ self.a, nn.functional.linear(x, self.a.reshape(8, 32)), y

    net = module_of(forward, a=nn.Parameter(torch.randn(32, 8)), b=nn.Parameter(torch.randn(8, 32)))
    model = torch.export.export(net.eval(), (torch.randn(4, 32),)).module()
    prepared = pt2mx.prepare_pt2e(model, MXQuantizer().set_small_weights(FP4, 256))
    assert [one.quantized for one in pt2mx.quantization_report(prepared).operators] == [True] * 4


def test_a_call_that_is_not_made_is_warned_about():
    quantizer = MXQuantizer().set_global(FP8).set_module_name_object_type_order("blocks.0", nn.Linear, 3, FP4)
    with pytest.warns(UserWarning, match=r"module_name_object_type_order \('blocks.0', .*Linear', 3\) matches no"):
        pt2mx.prepare_pt2e(exported(), quantizer)


def test_calls_inside_a_graph_in_the_graph_are_counted():
    def forward(self, x):
        with torch.no_grad():
            x = self.a(self.a(x))
        return self.a(x)

    model = torch.export.export(module_of(forward, a=nn.Linear(32, 32)).eval(), (torch.randn(2, 32),)).module()
    calls = number_calls(nodes_in_order(model))
    indices = [
        n for node, made in calls.items() for _, kind, n in made if kind.endswith(".Linear") and "linear" in node.name
    ]
    assert indices == [0, 1, 2]


OBSERVER = MXFormatObserver.with_args(candidates=("mxfp4",))
EVERY_FIELD = MXQuantizationConfig(
    "mxfp8{16}(rceil)", "mxfp4", "mxint8", "BFP[16|8]{32}", {"query": None, "value": "int4"}, "clipped", True,
    {"weight": OBSERVER},
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (MXQuantizationConfig(), {}),
        (FP4, {"activation": "mxfp4_e2m1{32}", "weight": "mxfp4_e2m1{32}"}),
        (
            EVERY_FIELD,
            {
                "activation": "mxfp8_e4m3{16}(rceil)",
                "weight": "mxfp4_e2m1{32}",
                "output": "mxint8{32}",
                "bias": "mxint16{32}",
                "operands": {"query": None, "value": "mxint4{32}"},
                "observer": {"weight": OBSERVER},
                "ste": "clipped",
                "is_qat": True,
            },
        ),
        (MXQuantizationConfig(observer=OBSERVER), {"observer": OBSERVER}),
    ],
)
def test_a_config_is_a_dictionary_and_back(config, plain):
    assert config.to_dict() == plain and MXQuantizationConfig.from_dict(plain) == config and hash(config)


def every_setting():
    return (
        MXQuantizer()
        .set_global(FP8)
        .set_object_type(nn.Linear, FP4)
        .set_object_type(torch.bmm, None)
        .set_module_name_regex(r"blocks\.\d", INT8)
        .set_module_name("head", None)
        .set_module_name_object_type_order("", nn.Linear, 0, INT8)
        .set_module_name_object_type_order("blocks.0", "matmul", 1, None)
        .set_first(FP4, 2)
        .set_small_weights(INT8, 4096)
    )


PLAIN = {
    "": FP8.to_dict(),
    "object_type": [("torch.nn.modules.linear.Linear", FP4.to_dict()), ("aten.bmm", None)],
    "module_name_regex": [(r"blocks\.\d", INT8.to_dict())],
    "module_name": [("head", None)],
    "module_name_object_type_order": [
        ("", "torch.nn.modules.linear.Linear", 0, INT8.to_dict()),
        ("blocks.0", "aten.matmul", 1, None),
    ],
    "first": [(2, FP4.to_dict())],
    "last": [],
    "small_weights": [(4096, INT8.to_dict())],
}


def settings(quantizer):
    return quantizer._global, quantizer._settings


def test_a_quantizer_is_a_dictionary_and_back():
    quantizer = every_setting()
    assert quantizer.to_dict() == PLAIN
    assert settings(MXQuantizer.from_dict(PLAIN)) == settings(quantizer)
    assert settings(MXQuantizer.from_dict(json.loads(json.dumps(PLAIN)))) == settings(quantizer)
    assert settings(MXQuantizer.from_dict({})) == settings(MXQuantizer())


def test_a_dictionary_may_hold_the_objects_themselves():
    objects = {
        "": FP8,
        "object_type": [(nn.Linear, FP4), (torch.ops.aten.bmm.default, None)],
        "module_name_object_type_order": [("", nn.Linear, 0, INT8)],
    }
    quantizer = MXQuantizer().set_global(FP8).set_module_type(nn.Linear, FP4).set_operator_type("aten.bmm", None)
    quantizer.set_module_name_object_type_order("", nn.Linear, 0, INT8)
    assert settings(MXQuantizer.from_dict(objects)) == settings(quantizer)


def test_a_recipe_holds_every_setting(tmp_path):
    quantizer, path = every_setting(), tmp_path / "recipe.yaml"
    assert "- - blocks.0\n  - aten.matmul\n  - 1\n  - null\n" in quantizer.to_recipe(path)
    assert settings(MXQuantizer.from_recipe(path)) == settings(quantizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: q.set_object_type(nn.functional.layer_norm, FP4), "neither a class of modules nor an operator"),
        (lambda q: q.set_object_type("aten.relu", FP4), "'aten.relu' is neither a class"),
        (lambda q: q.set_object_type(3, FP4), "3 is neither a class"),
        (lambda q: q.set_object_type("", FP4), "'' is neither a class"),
        (lambda q: q.set_object_type(nn.Linear, "mxfp4"), "expected an MXQuantizationConfig or None"),
        (lambda q: q.set_module_name_object_type_order(1, nn.Linear, 0, FP4), "the module 1 must be a qualified name"),
        (lambda q: q.set_module_name_object_type_order("a", nn.Linear, -1, FP4), "index=-1 must be an integer"),
        (lambda q: q.set_module_name_object_type_order("a", nn.Linear, True, FP4), "index=True must be an integer"),
        (lambda q: q.set_module_name_object_type_order("a", "aten.rel", 0, FP4), "'aten.rel' is neither"),
        (lambda q: q.set_module_name_object_type_order("a", nn.Linear, 0, 4), "expected an MXQuantizationConfig"),
        (lambda q: q.from_dict([]), "expected a dictionary of settings"),
        (lambda q: q.from_dict({"module": []}), "unknown key 'module' of settings: did you mean 'module_name'"),
        (lambda q: q.from_dict({"module_name": {"a": None}}), r"must be a list of \(key, config\)"),
        (lambda q: q.from_dict({"module_name_object_type_order": [("a", None)]}), r"\(key, key, key, config\)"),
        (lambda q: q.from_dict({"": {"weigth": "mxfp4"}}), "unknown key 'weigth' of a config: did you mean 'weight'"),
        (lambda q: q.from_dict({"first": [("1", None)]}), "count='1'"),
        (lambda q: q.set_small_weights(FP4, 0), "small_weights: values=0 must be an integer of at least 1"),
        (lambda q: MXQuantizationConfig.from_dict("mxfp4"), "expected a dictionary of activation"),
        (lambda q: q.set_filter_function(bool).to_dict(), "a filter function cannot be written to a dictionary"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(MXError, match=message):
        call(MXQuantizer())
