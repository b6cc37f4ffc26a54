"""Experts that were trained with MXFP4 weights and MXFP8 inputs, in files of weights alone."""

import copy

import pytest
import torch

import pt2mx
from pt2mx.pt2e.checkpoints.save import save_checkpoint
from pt2mx.pt2e.language.quantize import without_activation_matmuls
from tests.float_checkpoints import load_packed_model
from tests.pt2e.checkpoints.conftest import INPUTS

FP4 = pt2mx.MXSpec("mxfp4", scale_mode="even")


def quantizer(activation, others):
    """Quantize all but the router, or the experts alone."""
    config = pt2mx.MXQuantizationConfig(weight=FP4, activation=activation)
    made = pt2mx.MXQuantizer().set_global(config).set_module_name_regex(".*(embed_tokens|lm_head)", None)
    return without_activation_matmuls(made if others else made.set_module_name_regex(".*self_attn.*", None))


def trained(graph, others):
    """The model for MXFP8 inputs after a training, and the one of the same weights without formats of inputs."""
    prepared = pt2mx.prepare_qat_pt2e(graph, quantizer("mxfp8", others))
    generator = torch.Generator().manual_seed(0)
    lessons = [{**INPUTS, "input_ids": torch.randint(256, (2, 9), generator=generator)} for _ in range(4)]

    def other_logits(**inputs):  # any training that moves the weights
        return [2 * graph(**inputs)[0]]

    pt2mx.distill(prepared, other_logits, lessons, lr=1e-3)
    weights_alone = copy.deepcopy(graph)
    weights_alone.load_state_dict(prepared.state_dict(), strict=False)
    weights_alone = pt2mx.prepare_pt2e(weights_alone, quantizer(None, others))
    return prepared, pt2mx.convert_pt2e(prepared), pt2mx.convert_pt2e(weights_alone)


def codes(converted):
    return {name: tensor for name, tensor in converted.named_buffers() if tensor.dtype == torch.uint8}


@pytest.mark.slow_except("gpt_oss-mxfp4-fields0")
@pytest.mark.parametrize(
    ("family", "layout", "fields"),
    [
        ("gpt_oss", "mxfp4", {}),
        ("gpt_oss", "gguf", {}),
        ("qwen3_moe", "gguf", {"norm_topk_prob": True}),
        ("qwen3_moe", "compressed-tensors", {}),
        ("mixtral", "compressed-tensors", {}),
    ],
)
def test_files_have_the_bits_of_the_trained_model(bf16, logits, tmp_path, family, layout, fields):
    float_one, others = bf16(family, **fields), layout != "mxfp4"
    prepared, by_inputs, weights_alone = trained(float_one.graph, others)
    packed = codes(by_inputs)
    assert packed.keys() == codes(weights_alone).keys() and len(packed) == (12 if others else 4)
    assert all(torch.equal(tensor, packed[name]) for name, tensor in codes(weights_alone).items())
    values = dict(float_one.graph.named_parameters())
    for name, parameter in prepared.named_parameters():
        is_router = "router" in name or "mlp.gate." in name
        assert not (is_router or ".experts." in name) or not torch.equal(parameter, values[name]), name
        assert not is_router or torch.equal(by_inputs.get_parameter(name), parameter), name
    path = tmp_path / ("model.gguf" if layout == "gguf" else "out")
    save_checkpoint(weights_alone, float_one.model, path, layout)
    loaded = load_packed_model(path)
    assert torch.equal(logits(loaded), logits(weights_alone))
