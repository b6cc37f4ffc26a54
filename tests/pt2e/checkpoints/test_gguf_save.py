"""Language models written as GGUF: what gguf reads there, and what the configuration must not lose."""

import numpy as np
import pytest
import torch

from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, save_checkpoint
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from tests.float_checkpoints import load_packed_model
from tests.gguf_files import write_gguf
from tests.language_models import quantized_decoder, tiny_decoder, tokenizer_of_bytes

gguf = pytest.importorskip("gguf")

IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
FIELDS = {
    "gemma3": {"query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
}


OTHERS = ("mistral", "mixtral", "qwen2", "qwen3", "gemma3", "phi3", "qwen2_moe", "gpt_oss")

pytestmark = pytest.mark.filterwarnings("ignore:the setting module_name_regex")


def _quantizer():
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4{32}(even,even)"))
    return quantizer.set_module_name_regex(".*(embed_tokens|lm_head|gate|router)", None)


def _saved(family, path):
    fields = FIELDS.get(family, {})
    quantized = quantized_decoder(family, _quantizer(), **fields)
    save_checkpoint(quantized, tiny_decoder(family, **fields), path, "gguf")
    return quantized


@pytest.mark.parametrize("family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
def test_gguf_reads_the_values_of_the_program(family, tmp_path):
    """gguf dequantizes each tensor to the program's values, and transformers' model of them has its logits."""
    quantized = _saved(family, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    file = GGUFFile(tmp_path / "model.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(
            file.values(tensor.name).float().numpy(), expected.reshape(file.entries[tensor.name].shape)
        )
    loaded = load_float_gguf(tmp_path / "model.gguf")
    packed = load_packed_model(tmp_path / "model.gguf")
    stored = {name.partition(".")[2]: tensor for name, tensor in quantized.program.state_dict.items()}
    count = 0
    for name, data in packed.named_buffers():
        if name.endswith("_data"):
            match = next(tensor for key, tensor in stored.items() if key.endswith(name))
            assert torch.equal(match, data if match.shape == data.shape else data.transpose(-1, -2)), name
            count += 1
    assert count >= 8
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, quantized(IDS).logits, atol=1e-4)


def test_blocks_are_those_of_gguf(tmp_path):
    """gguf packs the values of a weight to the bytes in the file, where its scales are those of the rule `floor`."""
    quantizer = (
        MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4")).set_module_name_regex(".*(embed|head).*", None)
    )
    quantized = quantized_decoder("llama", quantizer)
    save_checkpoint(quantized, tiny_decoder("llama"), tmp_path / "model.gguf", "gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    values = file.values("blk.0.ffn_up.weight").numpy()
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(gguf.dequantize(packed, gguf.GGMLQuantizationType.MXFP4), values)
    ours, theirs = (
        file.blocks("blk.0.ffn_up.weight").unflatten(-1, (-1, 17)),
        torch.from_numpy(packed).unflatten(-1, (-1, 17)),
    )
    # a block whose largest code is below 4 has a smaller scale by the rule, and -0 is 0 for gguf
    same = (ours[..., 0] == theirs[..., 0]) & ((ours[..., 1:] & 15) != 8).all(-1) & ((ours[..., 1:] >> 4) != 8).all(-1)
    assert same.float().mean() > 0.1 and torch.equal(ours[same], theirs[same])


def test_the_tokenizer(tmp_path):
    quantized = quantized_decoder("llama", _quantizer())
    tokenizer = tokenizer_of_bytes(merges=[("a", "b")])
    save_checkpoint(quantized, tiny_decoder("llama"), tmp_path / "model.gguf", "gguf", tokenizer=tokenizer)
    metadata = GGUFFile(tmp_path / "model.gguf").metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 300 and tokens[256:260] == ["ab", "<s>", "</s>", "[PAD259]"]
    assert all(tokenizer.convert_tokens_to_ids(token) == i for i, token in enumerate(tokens[:259]))
    assert metadata["tokenizer.ggml.token_type"][256:260] == [1, 3, 3, 5]
    assert metadata["tokenizer.ggml.merges"] == ["a b"]
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert metadata["tokenizer.ggml.bos_token_id"] == 256 and metadata["tokenizer.ggml.eos_token_id"] == 257
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE


def test_llama_cpp_reads_no_tokenizer_without_merges(tmp_path):
    quantized, model = quantized_decoder("llama", _quantizer()), tiny_decoder("llama")
    with pytest.raises(MXError, match="it has no merges of byte pairs"):
        save_checkpoint(quantized, model, tmp_path / "model.gguf", "gguf", tokenizer=tokenizer_of_bytes())
    assert not list(tmp_path.iterdir())


@pytest.mark.compiled
def test_codes_of_a_file_are_written_again(tmp_path):
    """A program of all types of blocks gives the bytes of the file that it was read from."""
    model = tiny_decoder("llama", num_hidden_layers=1, intermediate_size=128)
    types = {"token_embd.weight|.*attn_q.weight": "Q8_0", ".*attn_(k|v).weight": "Q4_0", "output.weight": "MXFP4",
             ".*ffn_(gate|up|down).weight": "NVFP4"}  # fmt: skip
    extra = {"blk.0.ffn_up.scale": torch.tensor([0.3])}
    path = write_gguf(model, tmp_path / "read.gguf", types, extra)
    save_checkpoint(load_checkpoint(path), model, tmp_path / "written.gguf", "gguf")
    read, written = GGUFFile(path), GGUFFile(tmp_path / "written.gguf")
    assert {name: entry[:2] for name, entry in read.entries.items()} == {
        name: entry[:2] for name, entry in written.entries.items()
    }
    assert all(torch.equal(read.blocks(name), written.blocks(name)) for name in read.entries)


@pytest.mark.compiled_cases("mistral-*")
@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "llama",
            {"hidden_act": "gelu"},
            "cannot say that hidden_act of LlamaConfig is 'gelu': llama.cpp takes 'silu'",
        ),
        (
            "mistral",
            {"sliding_window": 8},
            "cannot say that sliding_window of MistralConfig is 8: llama.cpp takes None",
        ),
        ("llama", {"model_type": "granite"}, "'granite' cannot be written as GGUF: pt2mx writes llama, qwen2"),
    ],
)
def test_models_that_gguf_cannot_describe(family, fields, message, tmp_path):
    quantized, model = quantized_decoder("llama", _quantizer()), tiny_decoder(family)
    for name, value in fields.items():
        setattr(model.config, name, value)
    with pytest.raises(MXError, match=message):
        save_checkpoint(quantized, model, tmp_path / "model.gguf", "gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.compiled
def test_outputs_that_cannot_be_written(tmp_path):
    quantized = quantized_decoder("llama", _quantizer())
    model = tiny_decoder("llama")
    for path, message in (
        (tmp_path / "model", r"its name must end in \.gguf"),
        (tmp_path / "no" / "m.gguf", "cannot write"),
    ):
        with pytest.raises(MXError, match=message):
            save_checkpoint(quantized, model, path, "gguf")
    inputs = quantized_decoder("llama", MXQuantizer.from_recipe("mxfp4"))
    with pytest.raises(MXError, match="gguf holds weights alone"):
        save_checkpoint(inputs, model, tmp_path / "m.gguf", "gguf")
    assert not list(tmp_path.iterdir())
