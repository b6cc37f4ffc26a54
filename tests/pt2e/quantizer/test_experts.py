import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.extras import import_extra
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
