import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, distill
from pt2mx.pt2e.optimize.losses import kl_divergence
from tests.models import chain, module_of, tied
from tests.training_models import InterruptedLoss

QUANTIZER = MXQuantizer.from_recipe("mxfp4")
SIX = MXQuantizer.from_recipe("mxfp6")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return {"out": self.down(self.dropout(torch.relu(self.norm(self.up(x))))), "rows": torch.arange(len(x))}


def net(dtype=torch.float32, training=False):
    """A graph, batches whose 32 columns depend on 6 numbers, and one more batch."""
    torch.manual_seed(0)
    mixing = torch.randn(6, 32) / 6**0.5
    batches = [(torch.randn(64, 6) @ mixing).to(dtype) for _ in range(9)]
    model = Net().to(dtype).train(training)
    exported = torch.export.export(model, (batches[0],)).module()
    return exported, batches[1:], batches[0]


def prepared_of(exported, batches):
    return pt2mx.prepare_qat_pt2e(pt2mx.optimize(exported, QUANTIZER, batches), QUANTIZER)


def interrupted_at(call):
    return InterruptedLoss(lambda actual, expected: (actual["out"] - expected["out"]).square().sum(), call)


def error(model, exported, x):
    with torch.no_grad():
        expected = exported(x)["out"].float()
        return ((model(x)["out"].float() - expected).square().sum() / expected.square().sum()).item()


@pytest.mark.slow_except("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_come_nearer_and_the_exported_model_stays(dtype):
    exported, batches, x = net(dtype)
    prepared = prepared_of(exported, batches)
    saved = {name: tensor.clone() for name, tensor in exported.state_dict().items()}
    before = error(prepared, exported, x)
    assert distill(prepared, exported, batches, epochs=20, lr=3e-3) is prepared
    assert error(prepared, exported, x) < 0.9 * before
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.state_dict().items())
    converted = pt2mx.convert_pt2e(prepared)
    assert torch.equal(converted(x)["out"], prepared(x)["out"])
    assert all(p.dtype == dtype and p.grad is None and p.requires_grad for p in prepared.parameters())


def test_steps_that_are_too_long_are_not_kept():
    exported, batches, x = net()
    prepared = prepared_of(exported, batches)
    expected = prepared(x)["out"]
    distill(prepared, exported, batches, lr=10.0)
    assert torch.equal(prepared(x)["out"], expected)


@pytest.mark.compiled
def test_batches_that_another_model_computed():
    """Their gradients would run through that model at each step."""
    exported, batches, x = net()
    prepared = prepared_of(exported, batches)
    before = error(prepared, exported, x)
    scale = torch.ones((), requires_grad=True)
    distill(prepared, exported, [(batch * scale).exp().log() for batch in batches], epochs=20, lr=3e-3)
    assert error(prepared, exported, x) < before and scale.grad is None


def test_two_runs_give_the_same_bits_and_seeds_do_not():
    exported, batches, _ = net(training=True)  # with dropout
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    state = torch.random.get_rng_state()
    models = [distill(copy.deepcopy(prepared), exported, batches, lr=1e-3, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second, other = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())
    assert all(model.training for model in models)


def test_a_loss_and_a_function_of_the_users():
    exported, batches, x = net()
    prepared = prepared_of(exported, batches)

    def cosine(actual, expected):
        return 1 - nn.functional.cosine_similarity(actual["out"], expected["wanted"], dim=-1).mean()

    def program(inputs):
        return {"wanted": exported(inputs)["out"]}

    before = cosine(prepared(x), program(x)).item()
    distill(prepared, program, batches, cosine, epochs=20, lr=3e-3)
    assert cosine(prepared(x), program(x)).item() < 0.9 * before


def test_logits_by_the_divergence_of_their_classes():
    """The other loss would not take a shift of all logits for equal."""
    exported, batches, x = net()
    prepared = prepared_of(exported, batches)
    before = kl_divergence(prepared(x), exported(x)).item()

    def shifted(inputs):
        return {name: y + 100 for name, y in exported(inputs).items()}

    distill(prepared, shifted, batches, "kl_div", epochs=20, lr=3e-3)
    assert kl_divergence(prepared(x), exported(x)).item() < 0.9 * before


def test_batch_norms_named_batches_and_dynamic_shapes():
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 3, 8, 8)} for rows in (16, 8, 12)]
    shapes = {"x": {0: torch.export.Dim("rows")}}
    model = module_of(
        lambda self, x: self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3),
        norm=nn.BatchNorm2d(8),
        head=nn.Linear(8, 8),
    ).eval()
    exported = torch.export.export(model, (), batches[0], dynamic_shapes=shapes).module()
    trained = torch.export.export(model.train(), (), batches[0], dynamic_shapes=shapes).module()
    prepared = pt2mx.prepare_qat_pt2e(trained, QUANTIZER)
    counted = prepared.get_buffer("norm.num_batches_tracked").item()
    with torch.no_grad():  # a caller may disable gradients
        distill(prepared, exported, batches, epochs=20, lr=3e-3)
    assert prepared.training and trained.get_buffer("norm.num_batches_tracked") == counted
    assert prepared.get_buffer("norm.num_batches_tracked") > counted
    x = batches[0]["x"]
    assert torch.equal(pt2mx.convert_pt2e(prepared)(x=x), prepared.eval()(x=x))


def test_parameters_that_are_frozen_and_tied():
    torch.manual_seed(0)
    batches = [torch.randn(64, 32) for _ in range(4)]
    model = tied(chain(first=nn.Linear(32, 32), relu=nn.ReLU(), second=nn.Linear(32, 32)), "first", "second")
    model.second.bias.requires_grad_(False)
    exported = torch.export.export(model.eval(), (batches[0],)).module()
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    distill(prepared, exported, batches, epochs=10, lr=1e-3)
    actual = dict(prepared.named_parameters(remove_duplicate=False))
    (weight,) = {parameter for name, parameter in actual.items() if name.endswith("weight")}
    assert not torch.equal(weight, exported.get_parameter("first.weight"))
    assert torch.equal(actual["second.bias"], exported.get_parameter("second.bias"))
    assert not torch.equal(actual["first.bias"], exported.get_parameter("first.bias"))


def slices_of(graph):
    """A prepared anchor, and prepared slices of it in 6 and 4 bits."""
    anchor = pt2mx.prepare_qat_pt2e(graph, MXQuantizer.from_recipe("mxint8"))
    return [anchor, *(pt2mx.prepare_qat_pt2e(graph, q, anchor=anchor) for q in (SIX, QUANTIZER))]


@pytest.mark.compiled
def test_slices_are_trained_together():
    exported, batches, x = net()
    saved = {name: tensor.clone() for name, tensor in exported.state_dict().items()}
    models = slices_of(exported)
    before = [error(model, exported, x) for model in models]
    assert distill(models[0], exported, batches, slices=models[1:], epochs=20, lr=3e-3) is models[0]
    after = [error(model, exported, x) for model in models]
    assert sum(after) < 0.8 * sum(before) and after[2] < 0.7 * before[2] and after[0] < 0.2 * after[2]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.state_dict().items())
    parameters = [dict(model.named_parameters()) for model in models]
    assert all(one[name] is tensor for one in parameters for name, tensor in parameters[0].items())
    # the file of the anchor has them all
    wide = pt2mx.convert_pt2e(models[0])
    program = torch.export.export(wide, (x,))
    for recipe, model in zip((SIX, QUANTIZER), models[1:], strict=True):
        assert torch.equal(pt2mx.slice_program(program, recipe).module()(x)["out"], model(x)["out"])


def test_slices_give_the_same_bits_again_and_an_error_restores_all():
    exported, batches, _ = net()
    runs = [slices_of(exported) for _ in range(2)]
    first, second = (distill(one[0], exported, batches, slices=one[1:], lr=1e-3) for one in runs)
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    models = slices_of(exported)
    saved = [dict(model.named_parameters()) for model in models]
    with pytest.raises(KeyboardInterrupt):
        distill(models[0], exported, batches, interrupted_at(6), slices=models[1:])
    for model, names in zip(models, saved, strict=True):
        assert all(tensor is names[name] for name, tensor in model.named_parameters())


def test_bad_slices():
    exported, batches, _ = net()
    anchor, *_ = slices_of(exported)
    other = slices_of(copy.deepcopy(exported))[1]
    with pytest.raises(
        MXError, match="a slice does not share its parameters with the prepared model: call prepare_qat"
    ):
        distill(anchor, exported, batches, slices=[other])
    with pytest.raises(MXError, match="slices holds the prepared model itself"):
        distill(anchor, exported, batches, slices=[anchor])
    with pytest.raises(MXError, match="expected what prepare_qat_pt2e returned"):
        distill(anchor, exported, batches, slices=[exported])
    with pytest.raises(MXError, match=r"slices must be a list of models, not one .*: pass \[model\]"):
        distill(anchor, exported, batches, slices=anchor)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda actual, expected: actual["out"], "must give one number, a tensor, not a tensor of 2048"),
        (lambda actual, expected: 0.5, "must give one number, a tensor, not float"),
        (lambda actual, expected: torch.tensor(0.5), "no gradient"),
        (lambda actual, expected: actual["out"].sum() / 0, "is -?inf before training"),
        ("kl", "unknown loss 'kl': did you mean 'kl_div'"),
        (3, "unknown loss 3: allowed"),
    ],
)
def test_a_failed_call_leaves_the_model_as_it_was(loss, message):
    exported, batches, _ = net()
    prepared = prepared_of(exported, batches)
    saved = dict(prepared.named_parameters())
    values = {name: tensor.clone() for name, tensor in saved.items()}
    with pytest.raises(MXError, match=message):
        distill(prepared, exported, batches, loss)
    with pytest.raises(KeyboardInterrupt):
        distill(prepared, exported, batches, interrupted_at(4))
    for name, tensor in prepared.named_parameters():
        assert tensor is saved[name] and torch.equal(tensor, values[name]) and tensor.grad is None


def test_bad_input():
    exported, batches, _ = net()
    prepared = prepared_of(exported, batches)
    with pytest.raises(MXError, match="expected what prepare_qat_pt2e returned"):
        distill(exported, exported, batches)
    with pytest.raises(MXError, match="expected what prepare_qat_pt2e returned"):
        distill(pt2mx.prepare_pt2e(exported, QUANTIZER), exported, batches)
    with pytest.raises(MXError, match="must be a module or a function, not str"):
        distill(prepared, "model", batches)
    with pytest.raises(MXError, match=r"not Tensor: pass \[batch\]"):
        distill(prepared, exported, batches[0])
    with pytest.raises(MXError, match="batches is empty"):
        distill(prepared, exported, [])
    with pytest.raises(MXError, match="epochs=0"):
        distill(prepared, exported, batches, epochs=0)
    with pytest.raises(MXError, match="lr=-1"):
        distill(prepared, exported, batches, lr=-1)
    with pytest.raises(MXError, match="no parameter of the prepared model requires a gradient"):
        distill(copy.deepcopy(prepared).requires_grad_(False), exported, batches)
    pt2mx.disable_fake_quant(prepared)
    with pytest.raises(MXError, match="enable_fake_quant"):
        distill(prepared, exported, batches)
