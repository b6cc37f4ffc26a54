import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint, load_checkpoint, load_packed_model
from pt2mx.pt2e.checkpoints.save import save_checkpoint
from pt2mx.pt2e.language.quantize import quantize_language_model
from tests.language_models import tokenizer_of_bytes, transformers

FP4, FP8 = "mxfp4{32}(even,even)", "mxfp8_e4m3{32}(rceil)"
OTHERS = {".*embed_tokens": None, ".*mlp.gate": None, ".*router": None}

pytestmark = pytest.mark.filterwarnings("ignore:the setting module_name_regex")


def formats(report, unknown=()):
    """The specs of a report, without scale modes and roundings of the roles in `unknown`."""
    specs = [(operand.role, operand.spec) for row in report for operand in row.operands]
    return [(role, spec and (spec.partition("(")[0] if role in unknown else spec)) for role, spec in specs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {**OTHERS, ".*": (FP4, FP4)}),
        ("mixtral", {**OTHERS, ".*": (FP4, None)}),
        ("gpt_oss", {".*experts": (FP4, None)}),
    ],
)
def test_the_program_is_that_of_the_converted_model(bf16, quantizer, logits, tmp_path, family, settings):
    model = bf16(family).model
    quantized = quantize_language_model(model, quantizer(settings), tokenizer=tokenizer_of_bytes())
    save_checkpoint(quantized, model, tmp_path / "out")
    stages = []
    loaded = load_checkpoint(tmp_path / "out", stage=stages.append)
    assert stages == ["export"] and loaded.tokenizer is not None and loaded.generation_config.pad_token_id == 257
    expected, actual = ({n: t for n, t in one.program.state_dict.items() if "lifted" not in n and "inv_freq" not in n}
                     for one in (quantized, loaded))  # fmt: skip
    assert expected.keys() == actual.keys() and all(torch.equal(expected[name], actual[name]) for name in expected)
    assert torch.equal(logits(loaded), logits(quantized))
    assert torch.equal(logits(load_packed_model(tmp_path / "out"), mask=True), logits(quantized))
    reports = [pt2mx.quantization_report(one.program.module()).operators for one in (quantized, loaded)]
    # a checkpoint holds codes, not the modes that chose them
    assert [formats(report, unknown=("weight",)) for report in reports] == [formats(reports[1])] * 2
    save_checkpoint(loaded, model, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


@pytest.mark.slow
def test_generation(bf16, convert, tmp_path):
    float_one = bf16("qwen2")
    save_checkpoint(convert(float_one.graph, {".*_proj": (FP4, None)}), float_one.model, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    prompt = torch.tensor([[1, 2, 3]])
    tokens = loaded.generate(prompt, max_new_tokens=5, do_sample=False)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(tokens, stock.generate(prompt, max_new_tokens=5, do_sample=False))
    loaded.save_pretrained(tmp_path / "quantized")
    again = pt2mx.LanguageModel.from_pretrained(tmp_path / "quantized")
    assert torch.equal(again.generate(prompt, max_new_tokens=5, do_sample=False), tokens)


@pytest.fixture
def checkpoint(bf16, convert, tmp_path):
    """Make a checkpoint in a layout; a function changes its tensors and its quantization_config."""

    def make(change, layout="compressed-tensors", specs=(FP8, None)):
        float_one, folder = bf16("llama"), tmp_path / f"checkpoint of {getattr(change, '__name__', '')}"
        save_checkpoint(convert(float_one.graph, {".*q_proj": specs}), float_one.model, folder, layout)
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        change(tensors, config["quantization_config"])
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


Q = "model.layers.0.self_attn.q_proj.weight"


def _other_grid(tensors, config):
    tensors[f"{Q}_scale_inv"] = torch.ones(3, 1, dtype=torch.uint8)


def _integer_scales(tensors, config):
    tensors[f"{Q}_scale_inv"] = torch.ones(64, 2, dtype=torch.int32)


def _fewer_rows(tensors, config):
    tensors.update({name: tensors[name][:-1].clone() for name in (Q, f"{Q}_scale")})


def _e8m0_scales(tensors, config):
    tensors[f"{Q}_scale_inv"] = tensors[f"{Q}_scale_inv"].view(torch.float8_e8m0fnu)
    config["quant_method"] = "fp8"


def test_scales_of_their_own_dtype(checkpoint, logits):
    plain = logits(load_packed_model(checkpoint(lambda tensors, config: None, "fp8")))
    assert torch.equal(logits(load_packed_model(checkpoint(_e8m0_scales, "fp8"))), plain)


@pytest.mark.parametrize(
    ("layout", "change", "text"),
    [
        ("fp8", _other_grid, "codes of shape (64, 64) and scales of shape (3, 1): no block of fp8_e4m3"),
        ("fp8", _integer_scales, "q_proj.weight_scale_inv is torch.int32"),
        ("compressed-tensors", lambda tensors, config: tensors.pop(Q), f"the checkpoint holds no {Q}"),
        ("compressed-tensors", lambda tensors, config: tensors.pop("model.norm.weight"), "missing keys of the"),
        ("compressed-tensors", _fewer_rows, f"has {Q} of shape (63, 64), its config.json of (64, 64)"),
        ("compressed-tensors", lambda tensors, config: config.update(config_groups={}), "no codes of a LlamaForC"),
        ("compressed-tensors", lambda tensors, config: config.update(quant_method="awq"), "'awq' of the checkpoint is"),
        (
            "compressed-tensors",
            lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(group_size=16),
            "weights of group_0 in config_groups are not MX, but have group_size 16",
        ),
    ],
)  # fmt: skip
def test_what_is_no_mx_checkpoint(checkpoint, layout, change, text):
    with pytest.raises(MXError, match=re.escape(text)):
        load_checkpoint(checkpoint(change, layout))


def test_folders_that_hold_none(bf16, tmp_path):
    folder = bf16("llama").folder
    assert not is_mx_checkpoint(folder) and not is_mx_checkpoint(tmp_path)
    with pytest.raises(MXError, match="holds a checkpoint in high precision: quantize it"):
        load_checkpoint(folder)
    with pytest.raises(MXError, match=r"holds no config\.json"):
        load_checkpoint(tmp_path)
    with pytest.raises(MXError, match="3 is no path"):
        load_checkpoint(3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MXError, match="cannot read"):
        is_mx_checkpoint(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8", "group_size": 32}}')
    assert is_mx_checkpoint(tmp_path)
    with pytest.raises(MXError, match=r"holds neither model\.safetensors nor"):
        load_checkpoint(tmp_path)


class FloatsMade(TorchDispatchMode):
    """Count the bytes of float tensors that operators make on the CPU."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_cpu:
                storage = tensor.untyped_storage()
                self.bytes += storage.nbytes() * (storage.data_ptr() not in inputs)
        return result


def test_no_float_copy_is_made(bf16, convert, tmp_path):
    """`tests.benchmarks.memory --codes` measures the resident memory."""
    float_one = bf16("llama")
    save_checkpoint(convert(float_one.graph, {".*embed_tokens": None, ".*": (FP4, None)}), float_one.model, tmp_path)
    with FloatsMade() as made:
        model = load_packed_model(tmp_path)
        loaded = made.bytes
        model(torch.arange(3)[None])
    values = sum(parameter.nbytes for parameter in float_one.model.parameters())
    embedding = float_one.model.model.embed_tokens.weight.nbytes
    assert loaded < 1.1 * embedding < 0.5 * values  # norms and buffers of RoPE are small
    assert made.bytes > values - embedding  # each weight is decoded when it is read
