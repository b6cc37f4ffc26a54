"""Adapters compute and train what LoRA defines, and stay adapters in an exported file."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.pt2e.lora.adapters import adapters_of
from tests.compare import sqnr
from tests.flow import calibrated, convert, exported, reloaded
from tests.models import IDS, Tied, module_of
from tests.training_models import random_adapters

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def quantized(recipe):
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    return pt2mx.convert_pt2e(calibrated(exported(Tied().eval(), IDS), quantizer, IDS))


def linear(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(64, 48)).to(dtype).eval(), (X.to(dtype),), recipe)


@pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_of_one_layer(recipe, dtype):
    converted, x = linear(recipe, dtype), X.to(dtype)
    lora = random_adapters(pt2mx.add_lora(converted, 4, 6))
    a, b = (lora.get_parameter(f"0.lora_{factor}.weight").detach().clone().requires_grad_() for factor in "AB")
    expected = converted(x) + 1.5 * ((x @ a.to(dtype).T) @ b.to(dtype).T)
    expected.square().sum().backward()
    y = lora(x)
    y.square().sum().backward()
    least = 100 if dtype == torch.float32 else 40
    assert a.dtype == torch.float32 and y.dtype == dtype and sqnr(y, expected) > least
    assert sqnr(lora.get_parameter("0.lora_A.weight").grad, a.grad) > least
    assert sqnr(lora.get_parameter("0.lora_B.weight").grad, b.grad) > least


def test_only_adapters_train_and_codes_are_shared():
    converted = convert(Tied().eval(), (IDS,), "mxfp4")
    lora = pt2mx.add_lora(converted, 4, targets=["query", "head"])
    trained = [name for name, parameter in lora.named_parameters() if parameter.requires_grad]
    assert sorted(trained) == [f"{module}.lora_{f}.weight" for module in ("head", "query") for f in "AB"]
    codes = lora.get_buffer("query.weight_data")
    assert codes.dtype == torch.uint8 and codes.data_ptr() == converted.get_buffer("query.weight_data").data_ptr()
    assert sqnr(lora(IDS), converted(IDS)) > 100  # the updates are zero
    assert not any("lora" in name for name, _ in converted.named_parameters())
    before = lora.state_dict() | {name: tensor.clone() for name, tensor in lora.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(lora(IDS).flatten(0, 1), IDS.roll(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    changed = {name for name, tensor in lora.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(trained)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_an_exported_file_is_the_trained_model_to_the_bit(recipe):
    lora = random_adapters(pt2mx.add_lora(quantized(recipe), 4, 6))
    loaded = reloaded(torch.export.export(lora, (IDS,))).module()
    assert torch.equal(loaded(IDS), lora(IDS))
    found, expected = adapters_of(loaded), adapters_of(lora)
    assert found.keys() == expected.keys() == {"query", "key", "head"}
    for module, adapter in found.items():
        assert torch.equal(adapter.up, expected[module].up) and torch.equal(adapter.down, expected[module].down)
        assert adapter.scaling == 1.5 and adapter.rank == 4


def test_a_lowered_model_computes_the_same():
    lora = random_adapters(pt2mx.add_lora(convert(Tied().eval(), (IDS,), "mxfp4")))
    assert sqnr(pt2mx.lower_to_inductor(lora)(IDS), lora(IDS)) > 100


@pytest.mark.compiled
def test_compiled_steps_are_the_eager_ones():
    lora = random_adapters(pt2mx.add_lora(convert(Tied().eval(), (IDS,), "mxfp8")))
    lora(IDS).square().sum().backward()
    expected = {name: p.grad for name, p in lora.named_parameters() if p.requires_grad}
    lora.zero_grad()
    torch.compile(lora, fullgraph=True)(IDS).square().sum().backward()
    for name, gradient in expected.items():
        assert sqnr(lora.get_parameter(name).grad, gradient) > 60, name


def test_a_layer_that_is_called_twice_has_one_adapter():
    twice = module_of(lambda self, x: self.layer(torch.relu(self.layer(x))), layer=nn.Linear(64, 64))
    lora = random_adapters(pt2mx.add_lora(convert(twice, (X,), "mxfp4_weight_only")))
    (adapter,) = adapters_of(lora).values()
    assert len(adapter.sums) == 2
    merged = pt2mx.merge_lora(lora).model
    assert sqnr(merged(X), lora(X)) > 100 and set(dict(merged.named_parameters())) == {"layer.weight", "layer.bias"}


@pytest.mark.cuda
def test_training_on_a_gpu():
    lora = random_adapters(pt2mx.add_lora(linear("mxfp4_weight_only")))
    expected = lora(X)
    expected.square().sum().backward()
    gradient = lora.get_parameter("0.lora_A.weight").grad
    on_gpu = random_adapters(pt2mx.add_lora(linear("mxfp4_weight_only").cuda()))
    on_gpu.load_state_dict(lora.state_dict())
    y = on_gpu(X.cuda())
    y.square().sum().backward()
    assert sqnr(y, expected) > 60 and sqnr(on_gpu.get_parameter("0.lora_A.weight").grad, gradient) > 50
