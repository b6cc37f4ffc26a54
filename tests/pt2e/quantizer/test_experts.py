from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.pt2e.quantizer.experts import expert_parameters, routers
from tests.flow import exported
from tests.mixtures import batches, mixtures
from tests.models import module_of
from tests.quantized_by_hand import BOTH, Call, W, a, w


def test_experts_that_are_gathered_are_quantized_before(quantize):
    """`weight[ids] @ x`, as transformers' batched experts compute: the parameter is packed, not the gathered rows."""

    def forward(self, x, ids):
        h = torch.bmm(self.up[ids], x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(h.unsqueeze(1), self.down[ids])

    net = module_of(forward, up=nn.Parameter(torch.randn(4, 24, 40)), down=nn.Parameter(torch.randn(4, 24, 40)))
    model, inputs = net.eval(), (torch.randn(6, 40), torch.randint(4, (6,)))
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    x, ids = inputs
    with torch.no_grad():
        h = torch.bmm(w(model.up, -1)[ids], a(x.unsqueeze(-1), 1)).squeeze(-1)
        want = torch.bmm(a(h.unsqueeze(1), -1), w(model.down, 1)[ids])
        assert torch.equal(converted(*inputs), want) and torch.equal(prepared, want)
    assert set(converted.state_dict()) == {"up_data", "up_scale", "down_data", "down_scale"}
    roles = [{o.role: o.spec is not None for o in r.operands} for r in pt2mx.quantization_report(converted).operators]
    assert roles == [{"weight": True, "activation": True}] * 2


def test_rows_gathered_along_the_blocks_or_used_twice_are_quantized_after_the_gather(quantize):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(40, 8)), nn.Parameter(torch.randn(40, 40))
            self.register_buffer("cache", torch.randn(40, 8))

        def forward(self, x, ids):
            rows = self.b[ids]
            self.cache.add_(1)
            return x @ self.a[ids], x @ rows, rows @ x, torch.bmm(x[None], self.cache[ids][None])

    model, inputs = Rows().eval(), (torch.randn(40, 40), torch.randint(40, (40,)))
    exported = torch.export.export(model, inputs)
    x, ids = inputs
    prepared = pt2mx.prepare_pt2e(exported.module(), BOTH)
    got = pt2mx.convert_pt2e(prepared)(*inputs)
    with torch.no_grad():
        assert torch.equal(got[0], a(x, -1) @ a(model.a[ids], 0))
        assert torch.equal(got[1], a(x, -1) @ a(model.b[ids], 0))
        assert torch.equal(got[2], a(model.b[ids], -1) @ a(x, 0))
        assert torch.equal(got[3][0], a(x, -1) @ a(model.cache[ids] + 1, 0))


def test_the_grouped_matmul_of_transformers(quantize):
    import_extra("transformers", "hf")
    grouped_mm = torch.ops.transformers.grouped_mm_fallback
    model = Call(lambda x, offsets, experts: grouped_mm(x, experts, offsets), (3, 40, 24)).eval()
    inputs = (torch.randn(8, 40), torch.tensor([3, 3, 8]))
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    x, offsets = inputs
    with torch.no_grad():
        want = grouped_mm(a(x, -1), w(model.p[0], -2), offsets)
        assert torch.equal(converted(*inputs), want) and torch.equal(prepared, want)


@pytest.mark.slow_except("grouped_mm")
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_of_transformers(implementation, quantize):
    transformers = import_extra("transformers", "hf")
    options = dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1) | {"num_attention_heads": 2}
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, vocab_size=64, num_local_experts=4, use_cache=False, **options
    )
    model, inputs = transformers.MixtralForCausalLM(config).eval(), (torch.randint(64, (1, 6)),)
    model.set_experts_implementation(implementation)
    prepared, _, converted = quantize(torch.export.export(model, inputs, strict=False), BOTH, inputs)
    with torch.no_grad():
        assert torch.equal(converted(*inputs)["logits"], prepared["logits"])
        experts = model.model.layers[0].mlp.experts
        for name in ("gate_up_proj", "down_proj"):  # (experts, out, in)
            weight = getattr(experts, name)
            state = {n.rpartition(".")[2]: t for n, t in converted.state_dict().items() if f"experts.{name}" in n}
            data, scale = state[f"{name}_data"], state[f"{name}_scale"]
            transposed = implementation == "grouped_mm"  # the operator takes (experts, in, out)
            got = pt2mx.dequantize_mx(data, scale, W, axis=1 if transposed else 2)
            assert torch.equal(got.transpose(1, 2) if transposed else got, w(weight, -1))
    experts = [o for o in pt2mx.quantization_report(converted).operators if o.module.endswith("experts")]
    operator = "aten.bmm" if implementation == "batched_mm" else "transformers.grouped_mm_fallback"
    assert [o.operator for o in experts] == [operator] * 2
    assert all({o.role for o in e.operands if o.spec} == {"activation", "weight"} for e in experts)


class Gathered(nn.Module):
    """Experts that are gathered, a table of rows that are gathered by an input, and the best classes of a head."""

    def __init__(self):
        super().__init__()
        self.router, self.up, self.up_bias = (
            nn.Linear(32, 4),
            nn.Parameter(torch.randn(4, 24, 32)),
            nn.Parameter(torch.randn(4, 24)),
        )
        self.table, self.head = nn.Parameter(torch.randn(8, 32)), nn.Linear(24, 8)

    def forward(self, x, positions):
        x = x + self.table[positions]
        ids = self.router(x).sigmoid().argmax(-1)
        y = torch.bmm(self.up[ids], x.unsqueeze(-1)).squeeze(-1) + self.up_bias[ids]
        return self.head(y).topk(2)


def names_of(model, parameters):
    return {name for name, parameter in model.named_parameters() if parameter in parameters}


def test_routers_and_parameters_of_experts():
    (x, *_), model = batches(), mixtures()
    graph = exported(model, x)
    assert {node.args[1].target for node in routers(graph)} == {f"layers.{i}.router.weight" for i in (0, 1)}
    expected = {f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "up_bias", "down", "down_bias")}
    prepared = pt2mx.prepare_qat_pt2e(graph, BOTH)
    assert names_of(graph, expert_parameters(graph)) == names_of(prepared, expert_parameters(prepared)) == expected
    gathered = exported(Gathered(), torch.randn(6, 32), torch.arange(6))
    assert [node.args[1].target for node in routers(gathered)] == ["router.weight"]
    assert names_of(gathered, expert_parameters(gathered)) == {"up", "up_bias"}
    equal_rows = Call(lambda x, weight: torch._grouped_mm(x, weight), (3, 32, 16)).bfloat16()
    for model, x in ((nn.Linear(4, 4), torch.ones(2, 4)), (equal_rows, torch.ones(3, 8, 32).bfloat16())):
        dense = exported(model, x)
        assert not routers(dense) and not expert_parameters(dense)


class Region(nn.Module):
    """A router in a subgraph, whose scores are computed from its inputs by norms, too."""

    def __init__(self, linear, region):
        super().__init__()
        self.linear, self.region = linear, region

    def forward(self, x):
        with self.region():
            scores = self.linear(x)
        return scores.float() / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("region", [nullcontext, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_router_is_the_last_matmul_before_the_choice_in_its_subgraph_too(region):
    model, (x, *_) = mixtures(), batches()
    for layer in model.layers:
        layer.router = Region(layer.router, region)
    prepared = pt2mx.prepare_pt2e(exported(model, x), BOTH)
    operators = pt2mx.quantization_report(pt2mx.convert_pt2e(prepared)).operators
    in_float = [o.module for o in operators if not o.quantized]
    assert in_float == [f"layers.{i}.router.linear" for i in (0, 1)]


@pytest.mark.compiled_except("*quantized0", "*quantized4")
@pytest.mark.parametrize(
    ("setting", "quantized"),
    [
        (lambda quantizer, config: quantizer, []),
        (lambda quantizer, config: quantizer.set_operator_type("aten.linear", config), []),
        (lambda quantizer, config: quantizer.set_small_weights(config, 4096), []),
        (lambda quantizer, config: quantizer.set_module_name("layers.1.router", config), ["layers.1.router"]),
        (
            lambda quantizer, config: quantizer.set_module_name_regex(r".*router", config),
            ["layers.0.router", "layers.1.router"],
        ),
    ],
)
def test_a_router_stays_in_float_unless_a_setting_names_its_module(setting, quantized):
    config = pt2mx.MXQuantizationConfig(weight="mxfp4", activation="mxfp8")
    quantizer = setting(pt2mx.MXQuantizer().set_global(config), config)
    prepared = pt2mx.prepare_qat_pt2e(exported(mixtures(), batches()[0]), quantizer)
    operators = pt2mx.quantization_report(pt2mx.convert_pt2e(prepared)).operators
    found = {o.module: o for o in operators if o.module.endswith("router")}
    assert [name for name, router in found.items() if router.quantized] == quantized
    reasons = {router.reason for name, router in found.items() if not router.quantized}
    assert reasons <= {"a router: it chooses the experts of a token"} and len(found) == 2
    assert all(o.quantized for o in operators if o.module not in found)


def test_the_head_whose_best_classes_a_model_returns_is_no_router():
    model = exported(Gathered(), torch.randn(6, 32), torch.arange(6))
    report = pt2mx.quantization_report(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, BOTH)))
    assert {o.module for o in report.operators if o.quantized} >= {"head"}
