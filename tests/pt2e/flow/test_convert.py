import copy
import operator

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import FORMATS, MXError, MXQuantizer, get_default_mx_quantization_config, ops
from tests.compare import gradient_of
from tests.flow import calibrated, exported
from tests.graph import assert_unchanged, snapshot
from tests.models import BATCH, IMAGES, NormalizedConv, Residual, exported_conv, module_of

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config())


def prepared(quantizer=QUANTIZER):
    return calibrated(exported_conv(), quantizer, *IMAGES)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_prepared_model_to_the_bit(name, dtype, quantize):
    model, inputs = NormalizedConv().eval().to(dtype), (IMAGES[0].to(dtype),)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    want, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), want) and want.dtype == dtype


@pytest.mark.parametrize("fold", [True, False])
def test_graph_is_pairs_for_activations_and_packed_buffers_for_weights(fold):
    converted = pt2mx.convert_pt2e(prepared(), fold_quantize=fold)
    quantizes = converted.graph.find_nodes(op="call_function", target=ops.quantize_mx)
    dequantizes = converted.graph.find_nodes(op="call_function", target=ops.dequantize_mx)
    assert (len(quantizes), len(dequantizes)) == (2 if fold else 4, 4)
    for node in quantizes:
        assert sorted(u.args[1] for u in node.users) == [0, 1]
        assert all(u.target is operator.getitem for u in node.users)
    for node in dequantizes:
        assert {"val", "nn_module_stack", "stack_trace"} <= node.meta.keys()
        (consumer,) = node.users
        assert node.meta["nn_module_stack"] == consumer.meta["nn_module_stack"]
    floats = {n for n, t in converted.state_dict().items() if t.dtype == torch.float32}
    assert ("conv.weight" in floats) is not fold


def test_the_prepared_model_is_unchanged():
    model = prepared()
    before = snapshot(model)
    pt2mx.convert_pt2e(model)
    assert_unchanged(model, before)
    assert torch.equal(pt2mx.convert_pt2e(model)(*IMAGES), pt2mx.convert_pt2e(model)(*IMAGES))


def test_a_failed_convert_leaves_the_model_usable(monkeypatch):
    model = prepared()
    before = snapshot(model)

    def fail(self, graph_module, node):
        graph_module.graph.erase_node(list(graph_module.graph.nodes)[-1])
        raise MXError("no")

    with monkeypatch.context() as patch, pytest.raises(MXError, match="no"):
        patch.setattr(pt2mx.MXObserver, "convert", fail)
        pt2mx.convert_pt2e(model)
    assert_unchanged(model, before)
    assert pt2mx.convert_pt2e(model)(*IMAGES).shape == (2, 4)


@pytest.mark.parametrize(
    "model", [lambda: NormalizedConv(), lambda: exported_conv(), lambda: None, lambda: pt2mx.convert_pt2e(prepared())]
)
def test_what_was_not_prepared_is_refused(model):
    with pytest.raises(MXError, match="expected a prepared model"):
        pt2mx.convert_pt2e(model())


def test_a_model_that_was_cast_after_prepare_is_refused():
    with pytest.raises(MXError, match=r"conv.weight is torch.bfloat16 and was exported in torch.float32: cast"):
        pt2mx.convert_pt2e(prepared().bfloat16())


def test_bad_fold_argument():
    with pytest.raises(MXError, match="fold_quantize='yes'"):
        pt2mx.convert_pt2e(prepared(), fold_quantize="yes")


def test_exports_saves_and_loads(tmp_path, run_python):
    converted = pt2mx.convert_pt2e(prepared())
    program = torch.export.export(converted, IMAGES, dynamic_shapes=BATCH)
    torch.export.save(program, tmp_path / "m.pt2")
    want = converted(*IMAGES)
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(*IMAGES), want)
    torch.save((IMAGES, want), tmp_path / "io.pt")
    code = """
import torch, pt2mx
inputs, want = torch.load("io.pt")
print(torch.equal(torch.export.load("m.pt2").module()(*inputs), want))
"""
    assert run_python(code, cwd=tmp_path).split() == ["True"]


def test_state_dict_and_deepcopy():
    converted = pt2mx.convert_pt2e(prepared())
    want = converted(*IMAGES)
    copied = copy.deepcopy(converted)
    assert torch.equal(copied(*IMAGES), want)
    for buffer in copied.buffers():
        buffer.zero_()
    copied.load_state_dict(converted.state_dict())
    assert torch.equal(copied(*IMAGES), want)


def test_a_model_in_which_nothing_was_selected_converts_to_itself():
    model = exported_conv()
    quantizer = MXQuantizer().set_operator_type("aten.bmm", get_default_mx_quantization_config())
    with pytest.warns(UserWarning, match="matches no operator"):
        converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, quantizer))
    assert torch.allclose(converted(*IMAGES), model(*IMAGES), atol=1e-5)


def test_an_uncalibrated_model_converts():
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported_conv(), QUANTIZER))
    assert torch.equal(converted(*IMAGES), pt2mx.convert_pt2e(prepared())(*IMAGES))


@pytest.mark.compiled_except("mxfp6-False")
@pytest.mark.parametrize(("element", "compiles"), [("mxfp8", True), ("mxfp6", False), ("mxfp4", False)])
def test_the_gradient_of_the_input_passes_straight_through(element, compiles, compiler):
    """Codes carry no gradient, so the quantized branches could be missing in it."""
    x = torch.randn(4, 60)
    model = nn.Sequential(Residual(nn.Linear(60, 60)), nn.LayerNorm(60), Residual(nn.Linear(60, 60)))
    program = torch.export.export(model.eval(), (x,))
    config = get_default_mx_quantization_config(element, element)
    prepared = pt2mx.prepare_pt2e(program.module(), MXQuantizer().set_global(config))
    prepared(x)
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    want = gradient_of(prepared, x)
    assert torch.equal(gradient_of(converted, x), want)
    assert torch.equal(gradient_of(torch.export.export(converted, (x,)).module(), x), want)
    if compiles:
        assert torch.allclose(gradient_of(torch.compile(converted), x), want, rtol=1e-3, atol=1e-3)
    assert torch.allclose(gradient_of(pt2mx.lower_to_inductor(converted), x), want, rtol=1e-4, atol=1e-4)
    assert not converted(x).requires_grad


def test_a_split_weight_is_folded(quantize):
    inputs = (torch.randn(2, 8),)
    split = module_of(
        lambda self, x: [nn.functional.linear(x, part) for part in self.weight.chunk(3)],
        weight=nn.Parameter(torch.randn(24, 8)),
    )
    want, _, converted = quantize(torch.export.export(split.eval(), inputs), QUANTIZER, inputs)
    assert all(torch.equal(a, b) for a, b in zip(converted(*inputs), want, strict=True))
    assert set(converted.state_dict()) == {f"weight_{k}{n}" for k in ("data", "scale") for n in ("", "_1", "_2")}


def test_a_cast_weight_leaves_no_original(quantize):
    inputs = (torch.randn(2, 8),)
    cast = module_of(
        lambda self, x: nn.functional.linear(x, self.weight.to(x.dtype)),
        weight=nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16)),
    )
    want, _, converted = quantize(torch.export.export(cast.eval(), inputs), QUANTIZER, inputs)
    assert torch.equal(converted(*inputs), want)
    assert set(converted.state_dict()) == {"weight_data", "weight_scale"}


def test_training_on_does_not_change_what_was_converted():
    qat = pt2mx.prepare_qat_pt2e(exported(nn.Linear(8, 8).eval(), torch.randn(2, 8)), QUANTIZER)
    x = torch.randn(2, 8)
    converted = pt2mx.convert_pt2e(qat)
    want = converted(x)
    with torch.no_grad():
        for parameter in qat.parameters():
            parameter.add_(1)
    assert torch.equal(converted(x), want)


def test_weights_that_hold_a_nan_are_named():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[1].weight[2, 3] = torch.inf
    prepared = pt2mx.prepare_pt2e(torch.export.export(model, (torch.randn(2, 64),)).module(), QUANTIZER)
    with pytest.warns(UserWarning, match=r"NaN or Inf in 1\.weight: blocks that hold such become NaN as a whole"):
        pt2mx.convert_pt2e(prepared)
