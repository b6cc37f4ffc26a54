"""`gradient` of a config: in the graph that trains alone, in subgraphs, batch norms and models of other dtypes."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.fx.training.gradients import QuantizedBackward
from tests import subgraph_models
from tests.compare import relative_error, same
from tests.models import module_of
from tests.training_models import NORMALIZED_LAYERS, layer_and_norm

FINE = "int16{1}"
FORMATS = {"activation": "mxfp8", "weight": "mxfp4"}


class Model(nn.Module):
    """Two layers that share their weight, a dropout, and attention."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(40, 40), nn.Dropout(0.0), nn.Linear(40, 7)

    def forward(self, x):
        h = functional.relu(self.first(self.drop(self.first(x))), inplace=True)
        return self.last(functional.scaled_dot_product_attention(h, h, h))


def prepared(model, x, **config):
    exported = torch.export.export(model, (x,)).module()
    return pt2mx.prepare_qat_pt2e(exported, MXQuantizer().set_global(MXQuantizationConfig(**config)))


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def step(model, x):
    """The result, and the gradients of the parameters by name."""
    model.zero_grad()
    y = model(x)
    (y.float() * torch.arange(y.numel()).view(y.shape).sin()).sum().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_steps(one, other):
    (y, grads), (z, others) = one, other
    return same(y, z) and grads.keys() == others.keys() and all(same(grads[name], others[name]) for name in grads)


def test_the_forward_pass_its_mode_and_the_converted_model_do_not_change():
    model, x = Model(), numbers(2, 5, 40)
    for mode in (model.train(), model.eval()):
        plain, qat = prepared(mode, x, **FORMATS), prepared(mode, x, gradient="mxfp8_e5m2", **FORMATS)
        assert qat.training == plain.training and qat.state_dict().keys() == plain.state_dict().keys()
        (y, grads), (z, others) = step(qat, x), step(plain, x)
        assert same(y, z) and not any(torch.equal(grads[name], others[name]) for name in grads if "weight" in name)
        assert torch.equal(grads["last.bias"], others["last.bias"])
        graphs = [pt2mx.convert_pt2e(one).graph for one in (qat, plain)]
        assert [n.target for n in graphs[0].nodes] == [n.target for n in graphs[1].nodes]
    assert any(isinstance(m, QuantizedBackward) for m in qat.modules())
    calibrated = pt2mx.prepare_pt2e(
        torch.export.export(model, (x,)).module(),
        MXQuantizer().set_global(MXQuantizationConfig(gradient="mxfp8", **FORMATS)),
    )
    assert not any(isinstance(m, QuantizedBackward) for m in calibrated.modules())


def test_without_fake_quantization_gradients_are_those_of_the_float_model():
    model, x = Model(), numbers(2, 5, 40)
    qat = prepared(model, x, gradient="mxfp4", **FORMATS)
    pt2mx.disable_fake_quant(qat)
    (y, grads), (z, others) = step(qat, x), step(model, x)
    assert same(y, z) and all(same(grads[name], others[name]) for name in others)


@pytest.mark.compiled_except(
    "True-conv1d",
    "True-conv2d, grouped",
    "True-conv_transpose2d, grouped",
    "True-linear",
    "False-conv2d",
    "False-conv_transpose1d",
    "False-linear without bias",
)
@pytest.mark.parametrize("name", NORMALIZED_LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_layers_that_a_batch_norm_follows(name, training):
    model, (x,) = layer_and_norm(name)
    fine = {"activation": FINE, "weight": FINE}
    plain, qat = (prepared(model, x, **fine, **g).train(training) for g in ({}, {"gradient": FINE}))
    coarse = prepared(model, x, **fine, gradient="mxfp4").train(training)
    statistics = copy.deepcopy(model.state_dict())  # which the three share, and a step writes
    results = []
    for one in (plain, qat, coarse):
        results.append(step(one, x))
        model.load_state_dict(statistics)
    weight = next(key for key in results[0][1] if key.endswith("0.weight"))
    y, want = results[0]
    assert same(results[1][0], y) and same(results[2][0], y)
    assert all(relative_error(results[1][1][key], want[key]) < 1e-3 for key in want)
    assert relative_error(results[2][1][weight], want[weight]) > 1e-3
    assert pt2mx.convert_pt2e(qat).code == pt2mx.convert_pt2e(plain).code


TRAINABLE = [subgraph_models.Autocast, subgraph_models.Cond, subgraph_models.Scan, subgraph_models.Map]


@pytest.mark.compiled_except("Autocast", "Checkpoint")
@pytest.mark.parametrize("kind", [*TRAINABLE, subgraph_models.Checkpoint, subgraph_models.Branches])
def test_subgraphs(kind):
    model, x = kind(), subgraph_models.X
    steps = [step(prepared(model, x, activation=FINE, weight=FINE, **g), x) for g in ({}, {"gradient": FINE})]
    coarse = step(prepared(model, x, activation=FINE, weight=FINE, gradient="mxfp4"), x)[1]
    tolerance = 1e-2 if kind is subgraph_models.Autocast else 1e-3
    for name, want in steps[0][1].items():
        if not want.any():  # of a branch that did not run
            continue
        assert relative_error(steps[1][1][name], want) < tolerance
        assert "weight" not in name or relative_error(coarse[name], want) > 1e-2
    assert same(steps[0][0], steps[1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, x = Model().to(dtype), numbers(2, 5, 40).to(dtype)
    formats = {"activation": FINE, "weight": FINE}
    (y, want), (z, got) = (step(prepared(model, x, **formats, **g), x) for g in ({}, {"gradient": FINE}))
    assert same(y, z) and all(g.dtype == dtype and relative_error(g, want[n]) < 0.01 for n, g in got.items())


def test_frozen_weights_and_inputs_without_a_gradient():
    model, x = Model(), numbers(2, 5, 40)
    _, want = step(qat := prepared(model, x, gradient="mxfp4", **FORMATS), x)
    model.first.weight.requires_grad_(False)
    frozen = step(qat, x)[1]
    model.first.weight.requires_grad_(True)
    assert frozen.keys() == want.keys() - {"first.weight"}
    assert all(torch.equal(frozen[name], want[name]) for name in frozen)


def test_copies_and_checkpoints_train_alike(tmp_path):
    x = numbers(2, 5, 40)
    config = MXQuantizationConfig(gradient="mxfp4", gradient_hadamard=16, **FORMATS)
    want = step(qat := prepared(Model(), x, **config.to_dict()), x)
    assert same_steps(step(copy.deepcopy(qat), x), want) and same_steps(step(qat, x), want)
    MXQuantizer().set_global(config).to_recipe(tmp_path / "training.yaml")
    quantizer = MXQuantizer.from_recipe(tmp_path / "training.yaml")
    fresh = pt2mx.prepare_qat_pt2e(torch.export.export(Model(), (x,)).module(), quantizer)
    assert not same(step(fresh, x)[0], want[0])
    fresh.load_state_dict(qat.state_dict())
    assert same_steps(step(fresh, x), want)


def test_a_dynamic_batch():
    model, x = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8)), numbers(5, 40)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    config = MXQuantizationConfig(gradient="mxfp4", gradient_hadamard=8, **FORMATS)
    qat = pt2mx.prepare_qat_pt2e(exported, MXQuantizer().set_global(config))
    for rows in (33, 64):
        x = numbers(rows, 40)
        assert same_steps(step(qat, x), step(prepared(model, x, **config.to_dict()), x))


@pytest.mark.parametrize(
    ("model", "shape", "named"),
    [
        (nn.LSTM(8, 8, batch_first=True), (2, 3, 8), "lstm"),
        (nn.Conv1d(8, 8, 2, padding="same"), (2, 8, 9), "conv1d"),
        (lambda x, w: torch.einsum("bk,k->b", x, w), (3, 64), "einsum"),
        (torch.matmul, (3, 64), "matmul"),
    ],
)
def test_a_warning_names_operators_whose_gradients_stay(model, shape, named):
    if not isinstance(function := model, nn.Module):
        model = module_of(lambda self, x: function(x, self.weight), weight=nn.Parameter(torch.randn(64)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the export
        exported = torch.export.export(model, (numbers(*shape),)).module()
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(gradient="mxfp8", **FORMATS))
    with pytest.warns(UserWarning, match=f"{named}.* compute their gradients in high precision"):
        pt2mx.prepare_qat_pt2e(exported, quantizer)


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_eagers(backend, compiler):
    """Inductor sums in another order, which may move a value across a rounding boundary."""
    model, x = Model(), numbers(2, 33, 40)
    qat = prepared(model, x, gradient="mxfp8_e5m2", gradient_hadamard=16, **FORMATS)
    y, want = step(qat, x)
    z, got = step(torch.compile(qat, fullgraph=True, backend=backend), x)
    torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-5)
    got = {name.removeprefix("_orig_mod."): grad for name, grad in got.items()}
    assert got.keys() == want.keys()
    assert all(relative_error(got[name], want[name]) < 0.02 for name in want)
