"""`slice_language_model`: codes of the anchor's values in both programs, and a model that generates and is saved."""

import pytest
import torch

import pt2mx
from pt2mx import LanguageModel, MXError, MXQuantizationConfig, MXQuantizer, packed_weights
from tests.encoder_decoders import quantized_encoder_decoder, sources
from tests.language_models import decoder_by_recipe, exported_decoder, quantized_decoder

FP4 = MXQuantizer.from_recipe("mxfp4_weight_only")
PROMPT = torch.tensor([[1, 2, 3, 4]])


def check_weights(before, after, scale_mode="even"):
    """Compare the weights of two programs; return the elements of the second."""
    elements = set()
    for wide, narrow in zip(packed_weights(before), packed_weights(after), strict=True):
        assert wide.name == narrow.name and wide.spec.element.bits == 8
        scales, codes = pt2mx.quantize_mx(wide.dequantized(), narrow.spec.replace(scale_mode=scale_mode))
        assert torch.equal(narrow.codes, codes) and torch.equal(narrow.scales, scales), wide.name
        elements.add(narrow.spec.element.name)
    return elements


@pytest.mark.slow_cases("mixtral", "mamba")
@pytest.mark.parametrize("family", ["llama", "mixtral", "mamba"])  # linear layers, experts, a scan
@pytest.mark.compiled_cases("llama")
def test_a_decoder(family, tmp_path):
    fields = {"num_hidden_layers": 1}
    anchor = decoder_by_recipe("mxint8", family, **fields)
    sliced = pt2mx.slice_language_model(anchor, FP4)
    assert check_weights(anchor.program, sliced.program) == {"fp4_e2m1"}
    sliced.save_pretrained(tmp_path, FP4)
    assert pt2mx.provenance_of(tmp_path / "program.pt2").recipe == FP4.to_recipe()
    loaded, options = LanguageModel.from_pretrained(tmp_path), {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(PROMPT, **options), sliced.generate(PROMPT, **options))
    # activations of the anchor were quantized, and those of the recipe are not
    assert "pt2mx.quantize_mx" in anchor.program.graph_module.code
    assert "pt2mx.quantize_mx" not in sliced.program.graph_module.code


@pytest.mark.compiled
def test_it_is_the_quantized_model_with_the_values_of_the_anchor():
    """Its logits are those of quantizing the float decoder with these values, to the bit."""
    model, _ = exported_decoder("qwen2", num_hidden_layers=1)
    anchor = quantized_decoder("qwen2", MXQuantizer.from_recipe("mxfp8"), num_hidden_layers=1)
    narrow = MXQuantizer.from_recipe("mxfp4_weights_mxfp8_activations")
    sliced = pt2mx.slice_language_model(anchor, narrow)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with torch.no_grad():
            for weight in packed_weights(anchor.program):
                model.get_parameter(weight.name.removeprefix("model.")).copy_(weight.dequantized())
        expected = quantized_decoder("qwen2", narrow, num_hidden_layers=1)
        assert torch.equal(sliced(PROMPT).logits, expected(PROMPT).logits)
    finally:
        model.load_state_dict(before)


def test_a_quantized_cache_keeps_its_format(tmp_path):
    quantizer = MXQuantizer.from_recipe("decoder_best").set_algorithms(None)
    anchor = quantized_decoder("llama", quantizer, num_hidden_layers=1)
    with pytest.warns(
        UserWarning, match=r"the cache stays in mxint8\{32\}: slicing does not change it to the recipe's"
    ):
        sliced = pt2mx.slice_language_model(anchor, MXQuantizer.from_recipe("decoder_smallest"))
    for recipe in ("mxfp4_decoder", "mxfp4_weight_only"):  # of the same format, and of none
        again = pt2mx.slice_language_model(anchor, MXQuantizer.from_recipe(recipe))
        for model in (sliced, again):
            assert [one.dtype for one in model.layers[0]["keys"]] == [torch.uint8, torch.uint8]
    elements = {weight.name.split(".")[-2]: weight.spec.element.name for weight in packed_weights(sliced.program)}
    assert (elements["embed_tokens"], elements["lm_head"], elements["q_proj"]) == ("fp6_e2m3", "fp6_e2m3", "fp4_e2m1")
    assert sliced.generate(PROMPT, max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.compiled
def test_a_cache_of_values_is_quantized_where_the_recipe_says_so():
    anchor = decoder_by_recipe("mxint8", "llama", num_hidden_layers=1)
    narrow = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8")
    sliced = pt2mx.slice_language_model(anchor, narrow)
    expected = quantized_decoder("llama", narrow, num_hidden_layers=1)
    shapes = [[one.shape[3] for one in model.layers[0]["keys"]] for model in (sliced, expected)]
    assert shapes[0] == shapes[1] == [16, 1]
    assert check_weights(anchor.program, sliced.program) == {"fp4_e2m1"}
    assert sliced.generate(PROMPT, max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.slow
def test_an_encoder_decoder(tmp_path):
    anchor = quantized_encoder_decoder("t5", "mxint8")
    sliced = pt2mx.slice_language_model(anchor, FP4)
    for before, after in zip(anchor.programs, sliced.programs, strict=True):
        assert check_weights(before, after) == {"fp4_e2m1"}
    sliced.save_pretrained(tmp_path)
    options = {"max_new_tokens": 4, "do_sample": False, **sources("t5")}
    expected = LanguageModel.from_pretrained(tmp_path).generate(**options)
    assert torch.equal(sliced.generate(**options), expected)


def test_errors():
    anchor = decoder_by_recipe("mxint8", "llama", num_hidden_layers=1)
    with pytest.raises(MXError, match="expected a LanguageModel, not ExportedProgram: slice_program takes a program"):
        pt2mx.slice_language_model(anchor.program, FP4)
    with pytest.raises(MXError, match="expected an MXQuantizer, not str: make one with"):
        pt2mx.slice_language_model(anchor, "mxfp4")
    sliced = pt2mx.slice_language_model(anchor, FP4)
    eight = MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp8"))
    with pytest.raises(MXError, match=r"weight is fp4_e2m1, and the recipe's fp8_e4m3 is wider"):
        pt2mx.slice_language_model(sliced, eight)
