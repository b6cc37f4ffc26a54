"""Texts longer than the positions that a model knows: learned ones, or a table of computed ones."""

import copy

import pytest
import torch

from pt2mx import LanguageModel, MXError, MXQuantizer, quantize_language_model
from pt2mx.pt2e.language.arguments import LONGEST_TEXT
from pt2mx.pt2e.language.positions import check_positions, positions_of
from pt2mx.pt2e.language.rope import rope_positions
from tests.encoder_decoders import sources, tiny_encoder_decoder
from tests.language_models import exported_decoder, tiny_decoder, transformers

#: family -> the positions in its program, 32 by its configuration
LIMITS = {
    "gpt2": ({"n_positions": 32}, {"position_ids": 32}),
    "opt": ({"max_position_embeddings": 32}, {"position_ids": 32}),  # whose table has two more rows
    "gpt_neo": ({"max_position_embeddings": 32}, {"position_ids": 32}),
    "gptj": ({"n_positions": 32}, {"position_ids": 32}),
    "llama": ({"max_position_embeddings": 32}, {}),
    "bloom": ({}, {}),
}
ROOM = (
    r"^the prompt has {} tokens, and {} new ones are asked for, but the model has 32 positions: give {}{} or less, or a"
)
TOO_LONG = "^the prompt has {} tokens, but the model has 32 positions: give a shorter one$"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA_3 = {**YARN, "rope_type": "llama3", "original_max_position_embeddings": 32} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MESSAGE = r"^the text has a token at position {}, but the model knows the positions 0 to 31: give at most 32 tokens"


def error(position):
    return pytest.raises(MXError, match=MESSAGE.format(position))


@pytest.mark.parametrize("family", ["gpt2", "opt", *(pytest.param(n, marks=pytest.mark.slow) for n in [*LIMITS][2:])])
@torch.no_grad()
@pytest.mark.compiled_cases("opt")
def test_every_path_of_a_decoder(family):
    fields, limits = LIMITS[family]
    float_model, program = exported_decoder(family, **fields)
    assert positions_of(program) == limits
    model = LanguageModel(program, float_model.config)
    ids = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for more in ({}, {"num_beams": 2}) if family != "bloom" else ():
        with pytest.raises(MXError, match=TOO_LONG.format(33)):
            model.generate(ids, max_new_tokens=20, **more, **options)
        with pytest.raises(MXError, match=ROOM.format(20, 20, "max_new_tokens=", 13)):
            model.generate(ids[:, :20], max_new_tokens=20, **more, **options)
    if not limits:
        assert model(ids).logits.shape[1] == 33
        return
    output = model(ids[:, :32])  # as many as fit
    with error(32):
        model(ids)
    with error(32):
        model(ids[:, 32:], past_key_values=output.past_key_values)
    with error(40):
        model(ids[:, :1], position_ids=torch.full((2, 1), 40))
    # the last token is not read
    expected = float_model.generate(ids[:, :20], max_new_tokens=13, **options)
    assert torch.equal(model.generate(ids[:, :20], max_new_tokens=13, **options), expected)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def short(request):
    """A model of 32 positions: of RoPE, or of a table."""
    fields = {"llama": {"max_position_embeddings": 32, "num_hidden_layers": 1}, "gpt2": {"n_positions": 32}}
    float_model, program = exported_decoder(request.param, **fields[request.param])
    return LanguageModel(program, float_model.config)


class Streamed(list):
    """A streamer that keeps the values."""

    put = list.append

    def end(self):
        pass


def test_a_text_ends_at_the_last_position(short):
    """It has as many tokens as there is room for where the caller asked for more, and something else may end it."""
    model, ids, options = short, torch.arange(20)[None] + 1, {"do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, max_new_tokens=13, eos_token_id=None, **options)
    assert tokens.shape[1] == 33
    never = next(i for i in range(300) if i not in tokens)
    config = transformers.GenerationConfig(max_new_tokens=500, eos_token_id=never, **options)
    calls = [{"eos_token_id": never, **options, **asked} for asked in ({"max_new_tokens": 500}, {"max_length": 520})]
    for call in (*calls, {"generation_config": config}):
        streamed = Streamed()
        text = "^the text ends after 13 of 500 new tokens: the model has 32 positions$"
        with pytest.warns(UserWarning, match=text) as warned:
            assert torch.equal(model.generate(ids, streamer=streamed, **call), tokens)
        assert [warning.filename for warning in warned] == [__file__]
        assert torch.equal(torch.cat([value.flatten() for value in streamed]), tokens[0])
    end = int(tokens[0, 25])
    in_time = model.generate(ids, max_new_tokens=500, eos_token_id=end, **options)
    assert in_time.shape[1] <= 26 and in_time[0, -1] == end
    with pytest.raises(MXError, match=ROOM.format(20, 500, "max_new_tokens=", 13)):
        model.generate(ids, max_new_tokens=500, eos_token_id=None, **options)


def test_padding_needs_no_room(short):
    """Without a mask, tokens of padding say what is padding, unless they also end texts."""
    ids, options = torch.arange(20)[None] + 1, {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 5}
    padded = torch.nn.functional.pad(ids, (15, 0))
    alone = short.generate(ids, eos_token_id=None, **options)
    assert torch.equal(short.generate(padded, eos_token_id=None, **options)[:, 15:], alone)
    with pytest.raises(MXError, match=TOO_LONG.format(35)):
        short.generate(padded, eos_token_id=[5, 0], **options)


@pytest.mark.parametrize(("given", "count"), [(20, 12), (31, 1), (32, 1)])
def test_the_number_of_tokens_by_default(short, given, count):
    """It is that of transformers, which raises at the last position."""
    ids, options = torch.arange(given)[None] + 1, {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    warned = "has 32 positions" if given == 32 else "model-agnostic default `max_length`"
    with pytest.warns(UserWarning, match=warned):
        assert short.generate(ids, **options).shape[1] == given + count


def test_prompts_are_checked_before_their_room(short):
    none = torch.zeros(0, 5, dtype=torch.long)
    for mask in (None, none):
        with pytest.raises(MXError, match=r"^input_ids of shape \(0, 5\) hold no token"):
            short.generate(none, attention_mask=mask, max_new_tokens=3)
    with pytest.raises(MXError, match=r"^attention_mask must be of shape \(1, 3\), not \(2, 3\)$"):
        short.room(torch.ones(1, 3).long(), torch.ones(2, 3).long())
    mask = torch.tensor([[0, 0, 1], [0, 1, 1]])
    room = short.room(torch.ones(2, 3).long(), mask)
    assert (room.prompt, room.positions, room.row, room.new_tokens) == (2, 32, 1, 31)


def test_a_length_of_its_own_is_a_limit(short):
    """It counts padding, and what it needs to be longer is said."""
    model, mask = copy.copy(short), torch.tensor([[0, 1, 1, 1]])
    model.config = copy.deepcopy(short.config)
    model.__dict__.pop("_limits", None)  # those of the other configuration
    setattr(model.config, LONGEST_TEXT, 16)
    room = model.room(torch.ones(1, 4).long(), mask)
    assert (room.prompt, room.positions, room.new_tokens) == (4, 16, 13)
    with pytest.raises(MXError, match=r"give max_new_tokens=13 or less, or .*; or quantize .* --text-length 23$"):
        model.generate(torch.ones(1, 4).long(), max_new_tokens=20, eos_token_id=None)


def test_rope_refuses_what_was_asked_for_beyond_its_positions():
    float_model, program = exported_decoder("llama", max_position_embeddings=32, num_hidden_layers=1)
    model, ids = LanguageModel(program, float_model.config), torch.arange(40)[None] + 1
    options = {"do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids[:, :20], max_new_tokens=13, eos_token_id=None, **options)
    assert tokens.shape[1] == 33
    padded, mask = (torch.nn.functional.pad(one, (9, 0)) for one in (ids[:, :20], torch.ones(1, 20).long()))
    result = model.generate(padded, attention_mask=mask, max_new_tokens=13, eos_token_id=None, **options)
    assert torch.equal(result[:, 9:], tokens)
    model.generation_config.max_new_tokens = 500  # the model's default, which the caller did not ask for
    with pytest.warns(UserWarning, match="after 13 of 500 new tokens"):
        assert torch.equal(model.generate(ids[:, :20], eos_token_id=None, **options), tokens)
    with pytest.raises(MXError, match=TOO_LONG.format(33)):
        model.generate(ids[:, :33], **options)


@pytest.mark.parametrize(
    ("name", "fields", "positions"),
    [
        ("llama", {}, 64),
        ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 50}}, 200),
        ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 8}}, 64),
        ("llama", {"rope_parameters": {**YARN, "rope_type": "linear"}}, 256),
        ("llama", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, 64),
        ("llama", {"rope_parameters": LLAMA_3}, 64),
        ("gemma3_text", {"rope_parameters": {"full_attention": {**YARN, "rope_type": "linear"}}}, 256),
        ("mistral", {"sliding_window": 8}, None),
        ("mistral", {"sliding_window": 64}, None),
        ("mistral", {"sliding_window": 65}, 64),
        ("qwen2", {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "use_sliding_window": True}, 64),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}, 64),
        ("recurrent_gemma", {"sliding_window": 8}, None),
        ("falcon", {"alibi": True}, None),
        ("jamba", {}, None),
        ("mamba", {}, None),
        ("gpt2", {}, None),
        ("llama", {LONGEST_TEXT: 16}, None),
    ],
)
def test_positions_of_rope(name, fields, positions):
    config = transformers.AutoConfig.for_model(name, **{"max_position_embeddings": 64, **fields})
    config.max_position_embeddings = 64  # recurrent ones have none
    assert rope_positions(config) == positions


@torch.no_grad()
def test_padding_has_no_position():
    float_model, program = exported_decoder("gpt2", n_positions=32)
    model = LanguageModel(program, float_model.config)
    ids, mask = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0)), torch.ones(2, 40).long()
    mask[:, :8] = 0
    alone = model(ids[:, 8:]).logits
    assert torch.allclose(model(ids, attention_mask=mask).logits[:, 8:], alone, atol=1e-5)
    mask[1, 7] = 1
    with error(32):
        model(ids, attention_mask=mask)


@pytest.mark.slow
@torch.no_grad()
def test_encoder_decoders():
    float_model, source = tiny_encoder_decoder("bart", max_position_embeddings=32), sources("bart")
    model = quantize_language_model(float_model, MXQuantizer.from_recipe("mxfp4_weight_only"))
    assert model.positions == model.encoder.positions == {"slots": 32}
    assert copy.deepcopy(model).positions == {"slots": 32}
    long = torch.randint(256, (1, 33))
    for call in (model.generate, model.encode, model.get_encoder()):
        with error(32):
            call(long)
    with error(32):
        model(**source, decoder_input_ids=long.expand(3, 33))
    with error(32):
        model.generate(**source, max_new_tokens=40, do_sample=False)
    assert model.generate(**source, max_new_tokens=32, do_sample=False).shape == (3, 33)
    with error(32):
        quantize_language_model(float_model, MXQuantizer.from_recipe("mxfp4_weight_only"), [long])


@pytest.mark.compiled
def test_texts_that_calibrate():
    with error(39):
        texts = [torch.zeros(1, 40, dtype=torch.long)]
        quantize_language_model(tiny_decoder("gpt2", n_positions=32), MXQuantizer.from_recipe("mxfp8"), texts)


def test_positions_below_zero():
    with pytest.raises(MXError, match="at position -1, but the model knows the positions 0 to 31"):
        check_positions({"position_ids": 32}, 0, torch.tensor([[-1, 0]]), given=True)
    check_positions({"position_ids": 32}, 0, torch.tensor([[0, 31]]), given=True)
    check_positions({}, 0, torch.tensor([[-1, 5000]]), given=True)


def test_the_last_position_of_a_table():
    one = torch.tensor([[31]])
    check_positions({"table": 32}, 31, one)
    with pytest.raises(MXError, match=r"a token at position 32, but the model knows the positions 0 to 31"):
        check_positions({"table": 32}, 32, one + 1)
