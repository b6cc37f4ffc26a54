import pytest
import torch

import pt2mx
from pt2mx import LanguageModel, MXError, MXQuantizer, quantize_language_model
from pt2mx.pt2e.language import runtime
from pt2mx.pt2e.language.cache import CACHE, cache_in
from pt2mx.pt2e.language.step import Step
from tests.language_models import exported_decoder
from tests.vision_language_models import VISION_LANGUAGE, image_prompts, round_weights, tiny_vision_language_model

RECIPE = "mxfp4_weight_only"
#: they differ from the others in details
_LIKE_OTHERS = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl")
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] if kind in _LIKE_OTHERS else []) for kind in VISION_LANGUAGE]
GREEDY = {"max_new_tokens": 33, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function that quantizes a model, once, and returns its folder."""
    folders = {}

    def quantize(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            model = tiny_vision_language_model(kind)
            quantized = quantize_language_model(model, MXQuantizer.from_recipe(RECIPE))
            assert quantized.coverage.held == quantized.coverage.values
            quantized.save_pretrained(folders[kind])
        return folders[kind]

    return quantize


@pytest.mark.slow_cases("qwen3_vl", "gemma3")
@pytest.mark.parametrize("kind", KINDS)
def test_generate_gives_the_tokens_of_transformers(folder, kind, monkeypatch):
    steps, run = [], Step.run
    monkeypatch.setattr(Step, "run", lambda step: steps.append(1) or run(step))
    loaded, prompts = LanguageModel.from_pretrained(folder(kind)), image_prompts(kind)
    eager = round_weights(tiny_vision_language_model(kind))
    expected = eager.generate(**prompts, **GREEDY)
    actual = loaded.generate(**prompts, **GREEDY)
    assert torch.equal(actual, expected) and len(steps) == 32
    assert len(set(actual[:, -33:].flatten().tolist())) > 10
    with torch.no_grad():
        logits = eager(**prompts).logits
    read = prompts["attention_mask"] > 0
    assert torch.allclose(loaded(**prompts).logits[read], logits[read], atol=1e-4)


def test_ends_of_chunks_are_not_between_tokens_of_an_image():
    images = (image_prompts("gemma3")["input_ids"] == 258).long()
    assert list(runtime._ends_of_chunks(13, 4, images)) == [6, 12, 13]


@pytest.mark.compiled
def test_chunks_of_a_prompt_keep_images_whole(folder, monkeypatch):
    """In Gemma 3 the tokens of an image see each other, also where a chunk would end between them."""
    model, prompts = LanguageModel.from_pretrained(folder("gemma3")), image_prompts("gemma3")
    expected = model.generate(**prompts, **GREEDY)
    monkeypatch.setitem(runtime._CHUNK, "cpu", 4)
    assert torch.equal(model.generate(**prompts, **GREEDY), expected)


@pytest.mark.slow
def test_positions_go_on_after_images(folder):
    """The tokens of an image share positions, so positions of later text are smaller than the number of tokens."""
    model, prompts = LanguageModel.from_pretrained(folder("qwen3_vl")), image_prompts("qwen3_vl")
    eager = round_weights(tiny_vision_language_model("qwen3_vl"))
    text = torch.tensor([[3, 4], [5, 6], [7, 8]])
    with torch.no_grad():
        first = eager(**prompts)
        expected = eager(input_ids=text, **{CACHE: cache_in(first)}).logits
    cache = model(**prompts).past_key_values
    assert cache.shift.tolist() == [-7, -2, 0]
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 2), value=1)
    assert torch.allclose(model(text, mask, past_key_values=cache).logits[0], expected[0], atol=1e-4)  # no padding
    assert torch.equal(model.generate(**prompts, **GREEDY, use_cache=False), model.generate(**prompts, **GREEDY))


@pytest.mark.slow
def test_beams_and_a_quantized_cache(folder):
    model, eager = LanguageModel.from_pretrained(folder("llava")), round_weights(tiny_vision_language_model("llava"))
    prompts = image_prompts("llava")
    one = {
        **{name: prompts[name][1:2] for name in ("input_ids", "attention_mask")},
        "pixel_values": prompts["pixel_values"][2:],
    }
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 12}
    assert torch.equal(model.generate(**one, **options), eager.generate(**one, **options))
    quantizer = MXQuantizer.from_recipe("mxfp8").set_kv_cache("mxfp8")
    packed = quantize_language_model(tiny_vision_language_model("llava"), quantizer, [prompts["input_ids"][2:], one])
    with torch.no_grad():
        expected = tiny_vision_language_model("llava")(**prompts).logits[prompts["attention_mask"] > 0]
    error = packed(**prompts).logits[prompts["attention_mask"] > 0] - expected
    assert error.norm() < 0.5 * expected.norm()


def test_what_is_no_image(folder):
    model, prompts = LanguageModel.from_pretrained(folder("llava")), image_prompts("llava")
    pixels = prompts["pixel_values"]
    with pytest.raises(MXError, match="hold 12 image tokens, and the images have 8 features"):
        model.generate(**{**prompts, "pixel_values": pixels[:2]}, **GREEDY)
    for images in (pixels[:, :, :16], pixels[0], pixels[None], pixels.byte()):
        with pytest.raises(MXError, match=r"pixel_values must be torch.float32 of shape \(any, 3, 32, 32\), not "):
            model(**{**prompts, "pixel_values": images})
    with pytest.raises(MXError, match="not list: let the processor make it"):
        model.generate(**{**prompts, "pixel_values": [pixels]}, **GREEDY)
    with pytest.raises(MXError, match="input_ids must be tokens"):
        model.generate(pixel_values=pixels, **GREEDY)
    with pytest.raises(MXError, match="hold 12 image tokens, and the images have 0 features"):
        model(prompts["input_ids"], prompts["attention_mask"])
    with pytest.raises(MXError, match="the cache holds 13 tokens: give images with the first tokens"):
        model(prompts["input_ids"], pixel_values=pixels, past_key_values=model(**prompts).past_key_values)
    with pytest.raises(MXError, match="the model has no processor of images"):
        model.generate(text="hello", images=[object()])
    text = LanguageModel(exported_decoder("llama")[1], exported_decoder("llama")[0].config)
    with pytest.raises(MXError, match=r"the model reads text alone: for images, quantize it whole"):
        text.generate(**prompts, **GREEDY)


@pytest.mark.compiled
def test_what_is_no_grid_of_patches(folder):
    model, prompts = LanguageModel.from_pretrained(folder("qwen3_vl")), image_prompts("qwen3_vl")
    grid, pixels, mask = (prompts[name] for name in ("image_grid_thw", "pixel_values", "attention_mask"))
    for wrong, text in (
        ({"image_grid_thw": None}, "image_grid_thw must be torch.int64 of shape .any, 3., not NoneType"),
        (
            {"image_grid_thw": grid[:1]},
            r"image_grid_thw \[\[1, 4, 6\]\] must hold times, rows and columns of 72 patches",
        ),
        ({"image_grid_thw": grid - 1}, "in multiples of 2: let the processor make it"),
        ({"pixel_values": pixels[0]}, r"pixel_values must be torch.float32 of shape \(any, 1536\), not torch.float32"),
        ({"attention_mask": mask[:, 1:]}, r"attention_mask must be of shape \(3, 19\), not \(3, 18\)"),
    ):
        with pytest.raises(MXError, match=text):
            model.generate(**{**prompts, **wrong}, **GREEDY)


@pytest.mark.compiled
@pytest.mark.slow_except("llava")
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_images_and_tokens_of_other_dtypes(folder, kind):
    model, prompts = LanguageModel.from_pretrained(folder(kind)), image_prompts(kind)
    others = {**prompts, "pixel_values": prompts["pixel_values"].bfloat16(), "input_ids": prompts["input_ids"].int()}
    rounded = {**prompts, "pixel_values": prompts["pixel_values"].bfloat16().float()}
    assert torch.equal(model(**others).logits, model(**rounded).logits)


@pytest.mark.compiled
def test_towers_that_are_not_supported():
    model = tiny_vision_language_model("llava")
    model.config.vision_config.model_type = "pixtral"
    quantizer = MXQuantizer.from_recipe(RECIPE)
    with pytest.raises(
        MXError, match=r"LlavaForConditionalGeneration, a pixtral, is not supported: .*--part language_model"
    ):
        quantize_language_model(model, quantizer)
    with pytest.raises(MXError, match="the texts have no images for the vision tower"):
        tower = tiny_vision_language_model("llava")
        quantize_language_model(tower, quantizer.set_algorithms("balanced"), [torch.ones(1, 8, dtype=torch.long)])


@pytest.mark.compiled
def test_settings_of_one_of_both_programs():
    quantizer = MXQuantizer.from_recipe(RECIPE)
    quantizer.set_module_name_regex(r".*vision_tower.*", None).set_module_name_regex(r".*lm_head", None)
    quantizer.set_module_name_regex(r".*no_module", None)
    with pytest.warns(UserWarning, match="no_module' matches no operator") as caught:
        quantized = quantize_language_model(tiny_vision_language_model("llava"), quantizer)
    assert sum("matches no operator" in str(warning.message) for warning in caught) == 1
    tower, decoder = (pt2mx.quantization_report(one.module()) for one in quantized.programs)
    assert [row.module for row in tower.operators if row.quantized and "vision_tower" in row.module] == []
    assert any(row.quantized for row in tower.operators)
    assert [row.quantized for row in decoder.operators if "lm_head" in row.module] == [False]
    assert (tower + decoder).bytes_after == tower.bytes_after + decoder.bytes_after


@pytest.mark.compiled
def test_compiled(folder, compiler):
    model, prompts = LanguageModel.from_pretrained(folder("llava")), image_prompts("llava")
    expected = model.generate(**prompts, **GREEDY)
    model.compile()
    assert torch.equal(model.generate(**prompts, **GREEDY), expected)
    model.write_packages(folder("llava"))
    assert torch.equal(LanguageModel.from_pretrained(folder("llava")).generate(**prompts, **GREEDY), expected)
