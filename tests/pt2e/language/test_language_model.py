import shutil

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import LanguageModel, MXError, MXQuantizer
from pt2mx.pt2e.language import runtime
from tests.language_models import (
    exported_decoder,
    padded,
    quantized_decoder,
    tokenizer_of_bytes,
    transformers,
    with_rounded_weights,
)

RECIPE = "mxfp4_weight_only"
#: options of `generate`
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


def quantized(family):
    return quantized_decoder(family, MXQuantizer.from_recipe(RECIPE))


def another(model):
    """The same program without a tokenizer."""
    return LanguageModel(model.program, model.config, model.generation_config)


@pytest.fixture(scope="module")
def llama():
    model = quantized("llama")
    model.tokenizer = tokenizer_of_bytes()
    return model


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """Its folder, with a recipe."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    llama.save_pretrained(folder, MXQuantizer.from_recipe(RECIPE))
    return folder


# gemma3: its program is tested in test_decoder.py
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_generate_gives_the_tokens_of_transformers(llama, family):
    model, eager = llama if family == "llama" else quantized(family), with_rounded_weights(family)
    ids, mask = padded()
    for options in MODES.values():
        calls = {"attention_mask": mask, "max_new_tokens": 12, **options}
        torch.manual_seed(1)
        expected = eager.generate(ids, **calls)
        torch.manual_seed(1)
        assert torch.equal(model.generate(ids, **calls), expected)


def test_greedy_text_is_that_of_a_plain_loop_and_of_single_prompts(llama):
    ids, mask = padded()
    result = llama.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None)
    plain = llama.program.module()
    for row in range(3):
        tokens = ids[row : row + 1, int((mask[row] == 0).sum()) :]
        alone = llama.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert torch.equal(alone[0, -16:], result[row, -16:])
        for _ in range(16):  # read the whole text again for each token
            cache = llama.new_cache(1, tokens.shape[1])
            length = tokens.shape[1]
            logits = plain(
                input_ids=tokens,
                position_ids=torch.arange(length).unsqueeze(0),
                attention_mask=torch.ones(1, cache.layers[0].get_max_length(), dtype=torch.long),
                start=torch.tensor([0]),
                logits_to_keep=torch.tensor([length - 1]),
                keys=[layer.keys for layer in cache.layers],
                values=[layer.values for layer in cache.layers],
            )
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(tokens, alone)


def test_a_prompt_in_chunks_gives_the_same(llama, monkeypatch):
    ids = torch.randint(256, (2, 40))
    expected = llama(ids).logits
    monkeypatch.setitem(runtime._CHUNK, "cpu", 16)
    assert torch.allclose(llama(ids).logits, expected, atol=2e-6)
    assert torch.allclose(llama(ids, logits_to_keep=20).logits, expected[:, -20:], atol=2e-6)
    assert llama(ids, logits_to_keep=1).logits.shape == (2, 1, 300)


def test_a_text_goes_on_where_it_ended(llama):
    ids = torch.randint(256, (1, 20))
    whole, first = llama(ids), llama(ids[:, :15])
    rest = llama(ids[:, 15:], past_key_values=first.past_key_values)
    assert torch.allclose(torch.cat([first.logits, rest.logits], 1), whole.logits, atol=2e-6)
    assert rest.past_key_values.get_seq_length() == 20


def test_more_tokens_than_the_cache_has_room_for(llama):
    cache = llama.new_cache(1, 10)
    slots = cache.layers[0].get_max_length()
    with pytest.raises(MXError, match=rf"0 \+ {slots + 1} tokens do not fit into a cache of {slots}: make one"):
        llama(torch.zeros(1, slots + 1, dtype=torch.long), past_key_values=cache)


def test_text(llama):
    first = llama.generate(text="Hello", max_new_tokens=8, do_sample=False)
    both = llama.generate(text=["Hello", "A longer prompt"], max_new_tokens=8, do_sample=False)
    assert isinstance(first, str) and both[0] == first and len(both) == 2
    streamed = []

    class Streamer(transformers.TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            streamed.append(text)

    streamer = Streamer(llama.tokenizer, skip_prompt=True, skip_special_tokens=True)
    llama.generate(text="Hello", max_new_tokens=8, do_sample=False, streamer=streamer)
    assert "".join(streamed) == first
    with pytest.raises(MXError, match="no tokenizer"):
        another(llama).generate(text="Hello")


def test_a_folder_holds_all(llama, saved, tmp_path):
    loaded = LanguageModel.from_pretrained(saved)
    ids, mask = padded()
    assert torch.equal(loaded(ids, attention_mask=mask).logits, llama(ids, attention_mask=mask).logits)
    text = llama.generate(text="Hello", max_new_tokens=8, do_sample=False)
    assert loaded.generate(text="Hello", max_new_tokens=8, do_sample=False) == text
    assert loaded.generation_config.eos_token_id == llama.generation_config.eos_token_id
    assert "fp4_e2m1" in pt2mx.provenance_of(saved / "program.pt2").recipe
    with pytest.raises(MXError, match=r"holds no program\.pt2"):
        LanguageModel.from_pretrained(tmp_path)
    with pytest.raises(MXError, match="no folder 'nowhere': give the folder that `pt2mx quantize` wrote"):
        LanguageModel.from_pretrained("nowhere")
    with pytest.raises(MXError, match="cannot write to"):
        llama.save_pretrained(saved / "config.json")


@pytest.mark.compiled
def test_compiled(llama, compiler):
    ids, mask = padded()
    model = another(llama)
    model.compile()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), llama.generate(ids, **options))


def test_the_report_is_that_of_its_programs(llama):
    report = pt2mx.quantization_report(llama)
    assert report == pt2mx.quantization_report(llama.program.module(check_guards=False))
    specs = {operand.spec for row in report.operators for operand in row.operands}
    assert specs == {None, "mxfp4_e2m1{32}(even,even)"} and report.bytes_after < report.bytes_before


def test_a_float_program_serves_too():
    (model, program), ids = exported_decoder("llama"), torch.randint(256, (2, 10))
    with torch.no_grad():
        assert torch.allclose(LanguageModel(program, model.config)(ids).logits, model(ids).logits, atol=2e-6)


def test_a_program_of_another_kind_is_refused():
    x = torch.randn(2, 4)
    with pytest.raises(MXError, match="no decoder with a cache"):
        LanguageModel(torch.export.export(nn.Linear(4, 4), (x,)), None)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
        {"guidance_scale": 1.5},
        {"stop_strings": ["a"], "tokenizer": tokenizer_of_bytes()},
        {"prefill_chunk_size": 5},
        {"cache_implementation": "static"},
        {"output_scores": True, "return_dict_in_generate": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_generate(llama, options):
    eager, ids = with_rounded_weights("llama"), torch.randint(256, (1, 12)).repeat(1, 2)
    calls = {"max_new_tokens": 16, "do_sample": False, **options}
    expected, result = eager.generate(ids, **calls), llama.generate(ids, **calls)
    assert torch.equal(getattr(result, "sequences", result), getattr(expected, "sequences", expected))


@pytest.mark.parametrize("prompt", [{"inputs": torch.ones(1, 4, dtype=torch.long)}, {"text": "Hello"}])
def test_generate_refuses_options_out_of_their_range(llama, prompt):
    for config in ({"top_p": 1.5}, {"generation_config": transformers.GenerationConfig(do_sample=True, typical_p=2.0)}):
        with pytest.raises(MXError, match=r"_p=[12]\.[05] must be a number "):
            llama.generate(**prompt, do_sample=True, **config)


@pytest.mark.compiled
def test_generate_goes_on_with_a_cache_that_grows(llama):
    ids = torch.randint(256, (1, 12))
    calls = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    first = llama.generate(ids, max_new_tokens=230, **calls)
    second = llama.generate(first.sequences, max_new_tokens=60, past_key_values=first.past_key_values, **calls)
    assert torch.equal(second.sequences, llama.generate(ids, max_new_tokens=290, **calls).sequences)
    grown = llama(ids)
    for _ in range(21):  # the cache of a call grows with later calls
        grown = llama(ids, past_key_values=grown.past_key_values)
    assert grown.past_key_values.get_seq_length() == 264


def test_which_logits_are_kept(llama, monkeypatch):
    monkeypatch.setitem(runtime._CHUNK, "cpu", 8)
    ids = torch.randint(256, (1, 20))
    expected = llama(ids).logits
    for kept in ([-1], [10, 2], [19, 0, 9, 8]):
        assert torch.equal(llama(ids, logits_to_keep=torch.tensor(kept)).logits, expected[:, kept])
    with pytest.raises(IndexError):
        llama(ids, logits_to_keep=torch.tensor([20]))


def test_a_folder_is_written_anew(llama, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    another(llama).save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).tokenizer is None


@pytest.mark.compiled_except("config.json-{")
@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "{"), ("generation_config.json", "[]"), ("tokenizer.json", "{")]
)
def test_a_folder_with_a_broken_file(saved, tmp_path, name, content):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(MXError, match=r"(could not|cannot) read"):
        LanguageModel.from_pretrained(tmp_path)


def test_what_is_no_input(llama):
    ids = torch.zeros(2, 3, dtype=torch.long)
    cache = llama.new_cache(1, 8)
    filled = transformers.DynamicCache()
    filled.update(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16), 0)
    for call, text in [
        (lambda: llama.generate(text=""), "none of them empty"),
        (lambda: llama.generate(text=["a", 5]), "must be a prompt or a list of prompts"),
        (lambda: llama.generate("a"), r"inputs are tokens, .* not 'a': pass prompts as text="),
        (lambda: llama.generate(["a", "b"]), "pass prompts as text="),
        (lambda: llama.generate(text=[]), "must be a prompt or a list of prompts"),
        (lambda: llama.generate(ids, text="a"), "text and inputs say the same"),
        (lambda: llama(ids[0]), r"must be tokens, \(B, S\) int64"),
        (lambda: llama(ids[:, :0]), "hold no token"),
        (lambda: llama(ids, past_key_values=cache), "hold 2 sequences, the cache 1"),
        (lambda: llama(ids, past_key_values=filled), "past_key_values is a filled DynamicCache"),
        (lambda: llama(ids, attention_mask=torch.ones(1, 3)), r"attention_mask must be of shape \(2, 3\)"),
        (lambda: llama(ids, position_ids=torch.zeros(1, 3)), r"position_ids must be of shape \(2, 3\)"),
        (llama.train, "is for inference"),
    ]:
        with pytest.raises(MXError, match=text):
            call()
    assert llama.eval() is llama
    assert llama(ids, past_key_values=transformers.DynamicCache()).logits.shape == (2, 3, 300)
    assert len(llama.generate(text="abc", num_return_sequences=2, num_beams=2, max_new_tokens=2)) == 2


def test_prompts_that_a_compiled_reader_fills_up(llama):
    """As on a GPU, later tokens overwrite the padding after a prompt."""
    model, (ids, mask) = another(llama), padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected, logits = model.generate(ids, **options), model(ids).logits
    model.runner._pads = True
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.allclose(model(ids).logits, logits, atol=1e-6)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there(saved, device):
    with pytest.raises(MXError, match=f"device='{device}' must be"):
        LanguageModel.from_pretrained(saved, device)
