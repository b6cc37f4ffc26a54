import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, lower_to_inductor, ops
from pt2mx.fx import lower
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.kernels.select import USES
from pt2mx.ops import linear
from tests.flow import convert
from tests.graph import assert_unchanged, called, count, snapshot
from tests.models import BATCH, IDS, Tied, module_of

aten = torch.ops.aten


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
def test_before_and_after(recipe, fold):
    model = convert(Tied(), (IDS,), recipe, fold)
    lowered = lower_to_inductor(model)
    torch.testing.assert_close(lowered(IDS), model(IDS), rtol=1e-5, atol=1e-4)
    pairs = 3 if recipe == "mxfp8" else 0
    assert count(lowered, linear.linear_mx) == 3 and count(lowered, ops.fake_quantize_mx) == pairs
    assert count(lowered, ops.dequantize_mx) == 1 and count(lowered, aten.embedding.default) == 2
    left = (ops.quantize_mx, aten.linear.default, aten.matmul.default)
    assert not any(count(lowered, target) for target in left)
    names = {n for n, t in lowered.state_dict().items() if t.dtype == torch.uint8}
    assert names == {
        "head.weight_data", "head.weight_scale", "query.weight_data_joined", "query.weight_scale_joined",
        "up_data_t", "up_scale_t",
    }  # fmt: skip
    assert not any(t.requires_grad for t in [*lowered.parameters(), *lowered.buffers()])


@pytest.mark.parametrize("recipe", ["mxint8", "mxfp4_weight_only"])
def test_every_new_node_has_the_location_of_what_it_is_for(recipe):
    """Convolutions become nodes of several operators, embeddings two gathers. Quantizations are of no call."""
    x = torch.randn(8, 32, 8, 8)
    convolutions = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    for model, inputs in ((Tied(), (IDS,)), (convolutions, (x,))):
        lowered = lower_to_inductor(convert(model, inputs, recipe))
        for node in (node for node in lowered.graph.nodes if node.op == "call_function"):
            assert node.meta["stack_trace"] and node.meta["nn_module_stack"], node
            quantizes = "quantize" in str(node.target) or "quantize" in str(node.all_input_nodes[0].target)
            assert "torch_fn" in node.meta or quantizes or node.target is aten.permute.default, node


def test_a_weight_is_held_once(converted):
    lowered = lower_to_inductor(converted)
    held, before = lowered.state_dict(), converted.state_dict()
    assert sum(t.nbytes for t in held.values()) == sum(t.nbytes for t in before.values())
    assert held["head.weight_data"].data_ptr() == before["head.weight_data"].data_ptr()


def test_the_converted_model_is_unchanged(converted):
    before, meta = snapshot(converted), [dict(n.meta) for n in converted.graph.nodes]
    lower_to_inductor(converted, "meta")
    assert_unchanged(converted, before)
    assert [n.meta.keys() for n in converted.graph.nodes] == [m.keys() for m in meta]
    assert all(t.device.type == "cpu" for t in converted.state_dict().values())


def test_a_failed_pass_leaves_it_unchanged(converted, monkeypatch):
    def fail(model):
        model.graph.erase_node(model.graph.output_node())
        raise MXError("no")

    before = snapshot(converted)
    monkeypatch.setattr(lower, "PASSES", (*lower.PASSES, lower.LoweringPass(GraphPass(fail))))
    with pytest.raises(MXError, match="no"):
        lower_to_inductor(converted)
    assert_unchanged(converted, before)


def test_meta_is_kept(converted):
    for node in lower_to_inductor(converted).graph.nodes:
        if node.target in (linear.linear_mx, ops.fake_quantize_mx, ops.dequantize_mx):
            assert {"val", "nn_module_stack", "stack_trace"} <= node.meta.keys(), node


def test_lowered_exports_saves_loads_and_copies(converted, tmp_path):
    lowered = lower_to_inductor(converted)
    ids = torch.randint(20, (3, 4))
    want = lowered(ids)
    program = torch.export.export(lowered, (IDS,), dynamic_shapes=BATCH)
    torch.export.save(program, tmp_path / "lowered.pt2")
    for model in (torch.export.load(tmp_path / "lowered.pt2").module(), copy.deepcopy(lowered)):
        assert torch.equal(model(ids), want)
    assert torch.equal(lower_to_inductor(lowered)(ids), want), "lowered again it stays"


def test_a_reloaded_program_is_lowered_alike(converted, tmp_path):
    """A reloaded program lacks the meta of a conversion."""
    torch.export.save(torch.export.export(converted, (IDS,), dynamic_shapes=BATCH), tmp_path / "converted.pt2")
    lowered, reloaded = (
        lower_to_inductor(m) for m in (converted, torch.export.load(tmp_path / "converted.pt2").module())
    )
    ids = torch.randint(20, (5, 4))
    assert torch.equal(reloaded(ids), lowered(ids))
    assert called(lowered) == called(reloaded)


def test_a_report_is_of_the_converted_model(converted):
    with pytest.raises(MXError, match="reads a packed weight, as lower_to_inductor leaves it: report the converted"):
        pt2mx.quantization_report(lower_to_inductor(converted))


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_another_device(converted, device):
    lowered = lower_to_inductor(converted, device)
    assert lowered(IDS.to("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (None, "NoneType"),
        (nn.Linear(4, 4), "Linear"),
        (torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)).module(), "one without quantized tensors"),
    ],
)
def test_what_is_no_converted_model_is_refused(model, found):
    with pytest.raises(MXError, match=f"not {found}: pass what convert_pt2e returned"):
        lower_to_inductor(model)


def test_a_prepared_model_is_refused():
    program = torch.export.export(Tied().eval(), (IDS,))
    with pytest.raises(MXError, match="pass what convert_pt2e returned"):
        lower_to_inductor(pt2mx.prepare_pt2e(program.module(), MXQuantizer.from_recipe("mxfp8")))


@pytest.mark.parametrize("device", ["nowhere", "hpu", "privateuseone", -1, 3.5, ""])
def test_an_unknown_device_is_refused(converted, device):
    with pytest.raises(MXError, match=f"device={device!r} must be"):
        lower_to_inductor(converted, device)


def test_running_it_leaves_the_buffers_of_the_converted_model():
    def forward(self, x):
        self.calls.add_(1)
        return self.fc(x) * self.calls

    x = torch.randn(2, 64)
    model = convert(module_of(forward, fc=nn.Linear(64, 8), calls=nn.Buffer(torch.zeros(()))), (x,))
    lowered = lower_to_inductor(model)
    first, second = lowered(x), lowered(x)
    torch.testing.assert_close(second, 2 * first)
    assert (model.calls, lowered.calls) == (0, 2)
    torch.testing.assert_close(model(x), first)


@pytest.mark.compiled_except("options1")
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "max-autotune"}])
def test_compiled(options, compiler):
    lowered = lower_to_inductor(convert(Tied(), (IDS,), "mxfp4_weight_only", shapes=BATCH))
    with torch.no_grad():
        compiled = torch.compile(lowered, fullgraph=True, **options)
        for batch in (2, 3):
            ids = torch.randint(20, (batch, 4))
            torch.testing.assert_close(compiled(ids), lowered(ids), rtol=1e-4, atol=1e-4)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.other = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        with torch.no_grad():
            x = self.fc(x)
        x = torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: self.other(x) + x, (x,))
        return torch._higher_order_ops.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, self.other(x)), (torch.tensor(0), x)
        )[1]


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("fold", [True, False])
def test_graphs_inside(fold):
    inputs = torch.randn(2, 64), -torch.randn(2, 64)
    model = convert(Branches(), inputs[:1], fold=fold)
    lowered = lower_to_inductor(model)
    for x in inputs:
        torch.testing.assert_close(lowered(x), model(x))
    assert count(lowered, linear.linear_mx) == 4 and count(lowered, ops.fake_quantize_mx) == 4
    assert not any(count(lowered, t) for t in (ops.quantize_mx, ops.dequantize_mx, aten.linear.default))
    again = torch.export.export(lowered, inputs[:1]).module()
    for x in inputs:
        assert torch.equal(again(x), lowered(x))


def test_convolutions_keep_their_weight_packed(monkeypatch):
    monkeypatch.setitem(USES, "convolve packed weights", {})

    x = torch.randn(2, 32, 6, 6)
    net = module_of(lambda self, x: self.fc(self.conv(x).mean((2, 3))), conv=nn.Conv2d(32, 8, 3), fc=nn.Linear(8, 4))
    model = convert(net, (x,))
    lowered = lower_to_inductor(model)
    torch.testing.assert_close(lowered(x), model(x))
    (conv,) = lowered.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    assert conv.args[1].target is ops.dequantize_mx and conv.args[1].args[0].target == "conv.weight_data"
    assert conv.args[0].target is ops.fake_quantize_mx
