import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, convert_checkpoint
from pt2mx.algorithms import GPTQ, Rotation, gptq
from pt2mx.pt2e.checkpoints.statistics import InputStatistics, StatisticsFile, collect_statistics, save_statistics
from tests.language_models import tiny_decoder, transformers
from tests.models import module_of

SPEC = "mxfp4(even,even)"


@pytest.fixture
def llama(tmp_path):
    tiny_decoder("llama").bfloat16().save_pretrained(tmp_path / "float", max_shard_size="60KB")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype="auto").eval()


def batches():
    return [torch.randint(256, (4, 64)) for _ in range(4)]


def test_sums_of_inputs():
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Conv1d(5, 5, 1))
    xs = [torch.randn(2, 5, 8), torch.randn(3, 5, 8)]
    result = collect_statistics(net, xs)
    assert set(result) == {"0.weight", "2.weight"}
    rows = torch.cat([x.flatten(0, -2) for x in xs])
    assert result["0.weight"].rows == result["2.weight"].rows == 25
    assert torch.allclose(result["0.weight"].hessian, rows.T @ rows, atol=1e-5)
    inner = torch.relu(net[0](rows))
    assert torch.allclose(result["2.weight"].hessian, inner.T @ inner, atol=1e-5)
    assert not any(module._forward_pre_hooks for module in net)


def test_inputs_of_each_form():
    def net(self, x):
        return self.vector(x), self.keyword(input=x[None]), self.none(x.new_empty(0, 4))

    layers = {name: nn.Linear(4, 4) for name in ("vector", "keyword", "none")}
    result = collect_statistics(module_of(net, **layers), [torch.arange(4.0)])
    assert {name: one.rows for name, one in result.items()} == {"vector.weight": 1, "keyword.weight": 1}
    assert torch.equal(result["vector.weight"].hessian, torch.outer(torch.arange(4.0), torch.arange(4.0)))


def test_statistics_of_another_model(llama, tmp_path):
    for statistics, text in (
        ({"fc": InputStatistics(torch.eye(64), 1)}, "are of fc, and of no"),
        ([1], "must be what"),
    ):
        with pytest.raises(MXError, match=text):
            convert_checkpoint(tmp_path / "float", tmp_path / "out", statistics=statistics)
    assert not (tmp_path / "out").exists()


def test_batches_of_each_form(llama):
    ids = torch.randint(256, (2, 9))
    forms = [collect_statistics(llama, [one]) for one in (ids, (ids,), {"input_ids": ids})]
    for one in forms[1:]:
        assert all(torch.equal(one[name].hessian, forms[0][name].hessian) for name in forms[0]) and len(one) == 15


def test_a_correction_needs_the_model(llama, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    statistics = {name: InputStatistics(torch.eye(llama.state_dict()[name].shape[1]), 99)}
    recipe = MXQuantizer.from_recipe("mxfp4_weight_only").set_algorithms({"gptq": {"correction": 0.25}})
    with pytest.raises(MXError, match=r"GPTQ\(correction=0.25\) runs the model, and a checkpoint is"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", recipe, statistics=statistics)
    assert not (tmp_path / "out").exists()


def test_a_file_of_statistics(tmp_path):
    statistics = {"a.weight": InputStatistics(torch.eye(3), 7), "b.weight": InputStatistics(torch.ones(2, 2), 9)}
    save_statistics(statistics, tmp_path / "inputs.safetensors")
    read = StatisticsFile(tmp_path / "inputs.safetensors")
    assert len(read) == 2 and list(read) == ["a.weight", "b.weight"] and "c.weight" not in read
    for name, one in statistics.items():
        assert torch.equal(read[name].hessian, one.hessian) and read[name].rows == one.rows
    for metadata in ({}, {"rows": "{"}, {"rows": "3"}, {"rows": '{"b": 3}'}):
        save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors", metadata)
        with pytest.raises(MXError, match="holds no statistics"):
            StatisticsFile(tmp_path / "other.safetensors")
    with pytest.raises(MXError, match="rows=0 must be an integer of at least 1"):
        InputStatistics(torch.zeros(3, 3), 0)


@torch.no_grad()
def test_weights_are_rounded_by_gptq(llama, tmp_path):
    statistics = collect_statistics(llama, batches())
    del statistics["lm_head.weight"]
    save_statistics(statistics, tmp_path / "inputs.safetensors")
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_algorithms((GPTQ(damping=0.02),))
    convert_checkpoint(tmp_path / "float", tmp_path / "out", quantizer, statistics=statistics)
    convert_checkpoint(
        tmp_path / "float", tmp_path / "file", quantizer, statistics=StatisticsFile(tmp_path / "inputs.safetensors")
    )
    after = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        after |= load_file(path)
        assert path.read_bytes() == (tmp_path / "file" / path.name).read_bytes()
    for name, one in statistics.items():
        weight = llama.get_parameter(name)
        damping = 0.02 + 0.5 * weight.shape[1] / one.rows
        rounded = gptq(weight, one.hessian, pt2mx.parse(SPEC), damping=damping)
        codes = after[f"{name}_packed"], after[f"{name}_scale"]
        assert torch.equal(pt2mx.dequantize_mx(*codes, SPEC), rounded), name
        nearest = pt2mx.fake_quantize_mx(weight.float(), SPEC)
        assert _error(weight, rounded, one) < _error(weight, nearest, one), name
    scale, data = pt2mx.quantize_mx(llama.lm_head.weight, SPEC)
    assert torch.equal(after["lm_head.weight_packed"], data) and torch.equal(after["lm_head.weight_scale"], scale)


def _error(weight, rounded, statistics):
    """Return the error of the outputs for the inputs of the statistics."""
    difference = weight.float() - rounded
    return float(((difference @ statistics.hessian) * difference).sum())


def test_recipes_with_other_algorithms(llama, tmp_path):
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only").set_algorithms((Rotation(), GPTQ()))
    with pytest.raises(MXError, match="the recipe has Rotation, which is not applied"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantizer, statistics={})
    with pytest.raises(MXError, match="the recipe has Rotation, GPTQ, which is not applied"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantizer)
    assert not (tmp_path / "out").exists()
