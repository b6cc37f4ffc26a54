import pytest
import torch
import torch.distributed as dist

from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config, quantize_language_model
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.tensor_parallel import shard
from tests.language_models import FAMILIES, divisible_decoder, transformers
from tests.rank_processes import results_of_ranks

#: with biases everywhere, norms and inputs on all ranks, heads that are gathered or share a weight
SHARDED = ("llama", "gpt_neox", "gemma2")
#: variants of these
MORE = ("qwen2", "qwen3", "phi3", "gemma3", "mistral", "glm4", "smollm3")
#: layers sharded by columns; every rank holds all layers of the second list
COLUMNS, WHOLE = ("o_proj", "down_proj"), ("norm", "embed_tokens", "inv_freq")
TOKENS = torch.arange(40).reshape(2, 20)
TEXT = torch.randint(256, (1, 512), generator=torch.Generator().manual_seed(1))
BALANCED = MXQuantizer.from_recipe("mxfp4_weight_only").set_algorithms("balanced")


def weight_only(weight):
    return MXQuantizer().set_global(get_default_mx_quantization_config(weight=weight, activation=None))


def each_rank(work, count=2):
    """Return the result of `work` on each rank, without the other ranks."""
    result = []
    for place in ranks.rank_contexts(count):
        with place:
            result.append(work())
    return result


def compute(rank, families):
    with torch.no_grad():
        result = {family: shard(divisible_decoder(family))(TOKENS).logits for family in families}
    result["balanced"] = quantize_language_model(
        shard(divisible_decoder("llama", num_hidden_layers=1)), BALANCED, [TEXT]
    )(TEXT).logits
    return result


@pytest.mark.parametrize("families", [SHARDED, pytest.param(MORE, marks=pytest.mark.compiled)])
def test_two_ranks_compute_what_one_does(families):
    first, second = results_of_ranks(compute, families)
    for name, logits in first.items():
        assert torch.equal(logits, second[name])  # the ranks choose the same tokens
    with torch.no_grad():
        for family in families:
            assert torch.allclose(first[family], divisible_decoder(family)(TOKENS).logits, atol=1e-5), family
        one = divisible_decoder("llama", num_hidden_layers=1)
        expected = one(TEXT).logits
    nearest = quantize_language_model(one, MXQuantizer.from_recipe("mxfp4_weight_only"))(TEXT).logits
    assert (first["balanced"] - expected).square().mean() < 0.95 * (nearest - expected).square().mean()


@pytest.mark.compiled
def test_packed_shards_are_parts_of_the_whole():
    """Codes of half a byte, and blocks of 16 where a rank has 48 inputs, sharded by rows and by columns."""
    smaller = get_default_mx_quantization_config(weight="mxfp8{16}", activation=None)
    one = divisible_decoder("llama", num_hidden_layers=1, intermediate_size=96)
    quantizer = weight_only("mxfp4").set_module_name_regex(r".*\.mlp\..*", smaller)
    whole = quantize_language_model(one, quantizer).program.state_dict
    first, second = each_rank(lambda: quantize_language_model(shard(one), quantizer).program.state_dict)
    assert first.keys() == second.keys() == whole.keys()
    for name, tensor in whole.items():
        if any(word in name for word in WHOLE):
            assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor)
        else:
            dim = int(any(word in name for word in COLUMNS))
            assert torch.equal(torch.cat([first[name], second[name]], dim), tensor), name


def test_the_model_stays_and_lends_what_is_whole():
    one = divisible_decoder("llama")
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    part, _ = each_rank(lambda: shard(one))
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())
    assert part.model.embed_tokens.weight is one.model.embed_tokens.weight
    assert part.model.layers[0].mlp.down_proj.in_features == 64
    assert not one.model.layers[0].mlp.down_proj._forward_hooks


def test_a_head_is_whole_where_it_shares_a_weight_or_cannot_be_divided():
    for family, fields, rows in (("gemma3", {}, 300), ("llama", {"vocab_size": 301}, 301), ("llama", {}, 150)):
        part, _ = each_rank(lambda family=family, fields=fields: shard(divisible_decoder(family, **fields)))
        assert part.lm_head.weight.shape[0] == rows
        assert (part.lm_head.weight is part.get_input_embeddings().weight) == (family == "gemma3")


@pytest.mark.parametrize(
    ("family", "fields", "count", "text"),
    [
        ("llama", {}, 4, "num_key_value_heads=2 cannot be divided among 4 ranks"),
        ("llama", {"num_key_value_heads": 4}, 3, "num_attention_heads=4 cannot be divided among 3 ranks"),
        ("llama", {"intermediate_size": 129}, 2, r"129 outputs of model.layers.0.mlp.gate_proj cannot be divided"),
        ("gpt2", {}, 2, "no plan to divide the layers of GPT2LMHeadModel"),
        ("gpt_oss", {}, 2, "no plan to divide the layers of GptOss"),
        ("mixtral", {}, 2, "mlp.experts of Mixtral.* by 'moe_tp_experts': supported are linear layers"),
    ],
)
def test_what_cannot_be_divided(family, fields, count, text):
    with pytest.raises(MXError, match=text):
        each_rank(lambda: shard(divisible_decoder(family, **fields)), count)
    assert not dist.is_initialized()


def test_without_ranks_and_with_one():
    with pytest.raises(MXError, match="no ranks: run under torchrun"):
        shard(divisible_decoder("llama"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = divisible_decoder("gpt2")
        assert shard(whole) is whole
    finally:
        dist.destroy_process_group()


def test_code_that_counts_on_all_heads():
    sizes = {**FAMILIES["llama"][1], "intermediate_size": 128}
    whole = transformers.AutoModelForCausalLM.from_config(transformers.DogeConfig(**sizes)).eval()
    with pytest.raises(MXError, match="DogeForCausalLM cannot compute some of its heads"):
        each_rank(lambda: shard(whole))


@pytest.mark.compiled
def test_blocks_of_two_ranks():
    narrow = divisible_decoder("llama", intermediate_size=96, num_hidden_layers=1)
    with pytest.raises(MXError, match=r"a rank has 48 inputs of .*down_proj, no multiple of its block size, 32"):
        each_rank(lambda: quantize_language_model(shard(narrow), weight_only("mxfp4")))
