import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.hugging_face import load_checkpoint
from pt2mx.pt2e.cli.models import call, load_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": 99, "max_position_embeddings": 20, "bos_token_id": 0, "eos_token_id": 98, **SMALL}
IMAGE = {"image_size": 32, "patch_size": 8, **SMALL}
PAIR = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
IDS, MASK = {"input_ids": (2, 20)}, {"attention_mask": (2, 20)}
LONG = {"input_ids": (2, 33), "attention_mask": (2, 33)}

#: model -> (config, its fields, shapes of the inputs, of the first output)
MODELS = {
    "BertForSequenceClassification": ("BertConfig", {"vocab_size": 99, **SMALL}, LONG, (2, 2)),
    "LlamaForCausalLM": ("LlamaConfig", {"vocab_size": 99, "num_key_value_heads": 2, **SMALL}, LONG, (2, 33, 99)),
    "ViTForImageClassification": ("ViTConfig", IMAGE, {"pixel_values": (2, 3, 32, 32)}, (2, 2)),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
        {**LONG, "decoder_input_ids": (2, 33)},
        (2, 33, 99),
    ),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
        {**IDS, "pixel_values": (2, 3, 32, 32), **MASK},
        (2, 2),
    ),
    "CLIPTextModel": ("CLIPTextConfig", TEXT, {**IDS, **MASK}, (2, 20, 32)),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {"max_source_positions": 20, "max_target_positions": 16, "num_mel_bins": 10, **PAIR},
        {"input_features": (2, 10, 40), "decoder_input_ids": (2, 8)},
        (2, 8, 99),
    ),
}


@pytest.fixture
def checkpoint(tmp_path):
    """Saves a model with random weights."""
    transformers = import_extra("transformers", "hf")

    def save(name: str, config: str, fields: dict) -> str:
        getattr(transformers, name)(getattr(transformers, config)(**fields)).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_come_with_inputs(name, checkpoint):
    config, fields, inputs, output = MODELS[name]
    loaded = load_model(f"hf:{checkpoint(name, config, fields)}")
    assert {key: tuple(value.shape) for key, value in loaded.example.items()} == inputs
    assert list(loaded.example) == list(inputs), "in the order of forward"
    with torch.no_grad():
        want = call(loaded.module, loaded.example)
        got = call(loaded.export().module(), loaded.example)
    assert got[0].shape == output
    wanted, got = ([leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (want, got))
    assert len(got) == len(wanted) and all(map(lambda a, b: torch.allclose(a, b, atol=1e-5), got, wanted))


def test_inputs_have_the_dtype_of_the_model(checkpoint, tmp_path):
    name = checkpoint("ViTModel", "ViTConfig", IMAGE)
    import_extra("transformers", "hf").ViTModel.from_pretrained(name).bfloat16().save_pretrained(tmp_path)
    module, batches = load_checkpoint(name)
    assert module.dtype == torch.bfloat16 and {batch["pixel_values"].dtype for batch in batches} == {torch.bfloat16}
    assert len(batches) == 2 and not torch.equal(*(batch["pixel_values"] for batch in batches))


def test_other_inputs_are_an_error_that_says_what_to_do(checkpoint):
    fields = {**SMALL, "conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,)}
    name = checkpoint("Wav2Vec2Model", "Wav2Vec2Config", fields)
    message = r"no built-in inputs for 'input_values' of Wav2Vec2Model: give --model module\.py:factory"
    with pytest.raises(MXError, match=message):
        load_model(f"hf:{name}")


def test_no_checkpoint(tmp_path):
    with pytest.raises(MXError, match="is no Hugging Face checkpoint that can be loaded"):
        load_checkpoint(str(tmp_path))
