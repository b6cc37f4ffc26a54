"""Checkpoints of each layout against what vLLM looks for in them, and what `engines` says of it."""

import json
import re
from pathlib import Path

import pytest
import torch

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, convert_checkpoint, save_checkpoint
from pt2mx.pt2e.checkpoints import engines
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.models.layouts import LAYOUTS
from tests.engines.vllm.expectations import refusals
from tests.float_checkpoints import load_packed_model, of_weights
from tests.language_models import tiny_decoder, transformers
from tests.vision_language_models import vision_language_checkpoint

_VLLM = str(engines.VLLM)
_MODELS = ("llama", "mixtral", "qwen3_moe", "gpt_oss")
_FP4, _FP6, _FP8, _NV = "mxfp4(even)", "mxfp6(even)", "mxfp8(rceil)", "nvfp4(mse)"
#: layout, weights, inputs
_WRITTEN = [
    *(("compressed-tensors", form, None) for form in (_FP4, _FP6, _FP8, _NV)),
    *(("compressed-tensors", *forms) for forms in ((_FP4, _FP4), (_FP4, _FP8), (_FP6, _FP6), (_FP8, _FP8))),
    ("mxfp4", _FP4, None),
    *(("quark", form, None) for form in (_FP4, _FP6, _FP8)),
    *(("quark", *forms) for forms in ((_FP4, "mxfp4(floor)"), (_FP6, _FP6), (_FP4, "mxfp8(ceil)"))),
    ("modelopt", _NV, None),
    ("modelopt", _FP8, _FP8),
    *(("fp8", form, None) for form in (_FP4, _FP8)),
]


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Float checkpoints, whose head is no embedding, by family."""
    folder = tmp_path_factory.mktemp("float")
    for family in _MODELS:
        tiny_decoder(family, num_hidden_layers=1, tie_word_embeddings=False).bfloat16().save_pretrained(folder / family)
    return folder


def _quantizer(weight, activation=None, **regexes):
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=weight, activation=activation))
    for name, value in regexes.items():
        quantizer.set_module_name_regex(f".*{name}.*", value)
    return quantizer


def _loads(report):
    return not report.engines[_VLLM].startswith("does not load")


@pytest.mark.diagonal
@pytest.mark.slow_except("llama-*", "mixtral-compressed*-None", "gpt_oss-*mxfp4*", "qwen3_moe-compressed*-None")
@pytest.mark.parametrize(("layout", "form", "inputs"), _WRITTEN)
@pytest.mark.parametrize("family", _MODELS)
def test_what_engines_say_is_what_vllm_looks_for(floats, tmp_path, family, layout, form, inputs):
    """A checkpoint with all weights quantized, as far as the layout holds them."""
    if layout == "mxfp4" and family != "gpt_oss":
        with pytest.raises(MXError):
            convert_checkpoint(floats / family, tmp_path / "out", _quantizer(form, inputs), layout=layout)
        return
    report = convert_checkpoint(floats / family, tmp_path / "out", _quantizer(form, inputs), layout=layout)
    refused = refusals(tmp_path / "out")
    said = report.engines[_VLLM].split(" ")[0]
    assert said == "was" or (said == "loads") == (not refused), (report.engines, refused)


def test_each_layout_is_written():
    assert {layout for layout, *_ in _WRITTEN} == LAYOUTS.keys()


def _config(folder):
    return json.loads((folder / "config.json").read_text())


def _rewrite(folder, change):
    config = _config(folder)
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def _only_classes(config):
    for group in config["config_groups"].values():
        group["targets"] = [target for target in group["targets"] if "lm_head" not in target]


def test_a_quantized_head_is_found_by_its_name(floats, tmp_path):
    convert_checkpoint(floats / "llama", tmp_path / "out", of_weights("mxfp4(even)"))
    assert refusals(tmp_path / "out") == []
    _rewrite(tmp_path / "out", _only_classes)
    assert refusals(tmp_path / "out") == ["lm_head: it has weight, the checkpoint weight_packed, weight_scale"]


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_a_head_is_named_once(kind, tmp_path):
    """Also where its name in the checkpoint is longer than in the model: a second target would match nothing."""
    vision_language_checkpoint(kind, tmp_path / "float")
    convert_checkpoint(tmp_path / "float", tmp_path / "out", of_weights("mxfp4(even)"), dtype="bfloat16")
    (group,) = _config(tmp_path / "out")["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["re:.*lm_head$", "Linear"]


@pytest.mark.parametrize("head", ["mxfp8(rceil)", "mxfp4(even)", None])
def test_a_head_with_a_format_of_its_own(floats, tmp_path, head):
    config = None if head is None else MXQuantizationConfig(weight=head)
    report = convert_checkpoint(floats / "llama", tmp_path / "out", _quantizer("mxfp4(even)", lm_head=config))
    groups = _config(tmp_path / "out")["quantization_config"]["config_groups"]
    of_head = [name for name, group in groups.items() if "re:.*lm_head$" in group["targets"]]
    assert of_head == {"mxfp8(rceil)": ["group_1"], "mxfp4(even)": ["group_0"], None: []}[head]
    assert refusals(tmp_path / "out") == [] and _loads(report)


def test_an_architecture_that_did_not_run(tmp_path):
    tiny_decoder("phi3", num_hidden_layers=1).bfloat16().save_pretrained(tmp_path / "float")
    quantizer = _quantizer("mxfp4(even)", lm_head=None, embed_tokens=None)
    report = convert_checkpoint(tmp_path / "float", tmp_path / "out", quantizer)
    assert report.engines[_VLLM] == "was not tried with the architecture phi3"
    assert report.engines[str(engines.TRANSFORMERS)] == "loads it"


def test_a_head_that_vllm_builds_in_high_precision(floats, tmp_path):
    quantizer = _quantizer("mxfp4(even)", experts=None)
    report = convert_checkpoint(floats / "gpt_oss", tmp_path / "out", quantizer)
    expected = "does not load the head of gpt-oss in fp4_e2m1 (it has this head in high precision)"
    assert report.engines[_VLLM] == expected and report.engines[str(engines.TRANSFORMERS)] == "loads it"
    assert refusals(tmp_path / "out") == ["lm_head: it has weight, the checkpoint weight_packed, weight_scale"]
    jamba = engines.readings_of("compressed-tensors", engines.FLOAT_HEAD, "fp4_e2m1")
    assert [reading.loads for reading in jamba] == [None, True]
    of_quark = [engines.readings_of("quark", head, "fp4_e2m1") for head in (engines.HEAD, engines.GPT_OSS_HEAD)]
    assert of_quark[0] == of_quark[1]


@pytest.mark.parametrize(
    ("family", "form"), [("gpt_oss", "mxfp4(even)"), ("gpt_oss", "mxfp8(rceil)"), ("mixtral", "mxfp8(rceil)")]
)
def test_experts_in_high_precision_are_ignored(floats, tmp_path, family, form):
    convert_checkpoint(floats / family, tmp_path / "out", _quantizer(form, experts=None, lm_head=None))
    assert refusals(tmp_path / "out") == []
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock(torch.arange(8)[None]).logits.isfinite().all()
    _rewrite(tmp_path / "out", lambda config: config.update(ignore=[n for n in config["ignore"] if n[:3] != "re:"]))
    (refusal,) = refusals(tmp_path / "out")
    assert re.match(r"model\.layers\.0\.\w+\.experts: ", refusal)


@pytest.mark.parametrize("layout", ["modelopt", "quark", "fp8"])
def test_experts_in_high_precision_of_other_layouts(floats, tmp_path, layout):
    form = {"modelopt": "nvfp4(mse)", "quark": "mxfp4(even)", "fp8": "fp8_e4m3{128x128}"}[layout]
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    tiny_decoder("mixtral", **sizes, tie_word_embeddings=False).bfloat16().save_pretrained(tmp_path / "float")
    convert_checkpoint(
        tmp_path / "float", tmp_path / "out", _quantizer(form, experts=None, lm_head=None), layout=layout
    )
    assert refusals(tmp_path / "out") == []


@pytest.mark.parametrize("other", [MXQuantizationConfig(weight="mxfp8(rceil)"), None])
def test_one_format_for_layers_that_vllm_fuses(floats, tmp_path, other):
    quantizer = _quantizer("mxfp4(even)", k_proj=other)
    report = convert_checkpoint(floats / "llama", tmp_path / "out", quantizer)
    assert report.engines[_VLLM] == "was not tried with k_proj, q_proj, v_proj in several formats (its code takes one)"
    assert refusals(tmp_path / "out")[0].startswith("model.layers.0.self_attn.qkv_proj: ")
    assert report.engines[str(engines.TRANSFORMERS)] == "loads it"


def test_a_head_in_quark_is_written_as_values_unless_asked(floats, tmp_path):
    report = convert_checkpoint(floats / "llama", tmp_path / "out", layout="quark")
    assert report.left["lm_head.weight"].startswith("no engine is known to load a quantized head in quark")
    assert report.engines[_VLLM] == "loads it" and refusals(tmp_path / "out") == []
    report = convert_checkpoint(floats / "llama", tmp_path / "asked", layout="quark", quantized_head=True)
    assert report.engines[_VLLM] == "does not load the head in fp4_e2m1 (it has heads in high precision)"
    assert [one.partition(":")[0] for one in refusals(tmp_path / "asked")] == ["lm_head"]


@pytest.mark.compiled
def test_a_program_with_a_quantized_head(floats, tmp_path):
    """The same for `save_checkpoint`: the head in Quark becomes the values of its codes."""
    convert_checkpoint(floats / "llama", tmp_path / "mx")
    program, skeleton = load_checkpoint(tmp_path / "mx"), tiny_decoder("llama", num_hidden_layers=1)
    ids = torch.arange(8)[None]
    expected = load_packed_model(tmp_path / "mx")(ids).logits
    for layout, asked, loads, is_changed in (
        ("compressed-tensors", False, True, False), ("quark", False, True, True), ("quark", True, False, False),
    ):  # fmt: skip
        folder = tmp_path / f"{layout}-{asked}"
        report = save_checkpoint(program, skeleton, folder, layout, quantized_head=asked)
        assert (report.engines[_VLLM] == "loads it", not refusals(folder)) == (loads, loads)
        assert (
            report.changes
            == ["lm_head is written as values: no engine is known to load its codes in quark"] * is_changed
        )
        assert torch.equal(load_packed_model(folder)(ids).logits, expected)


@torch.no_grad()
def test_inputs_of_a_quantized_head_in_quark(tmp_path):
    """Values cannot replace codes whose inputs are quantized, so that the checkpoint has codes, and says it."""
    model = tiny_decoder("llama", num_hidden_layers=1).bfloat16()
    ids = torch.arange(8)[None]
    graph = torch.export.export(model, (ids,), {"use_cache": False}, strict=False).module()
    quantizer = MXQuantizer().set_module_name_regex(".*lm_head", MXQuantizationConfig(weight=_FP4, activation=_FP4))
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, quantizer))
    report = save_checkpoint(converted, model, tmp_path / "out", "quark")
    assert report.changes == [] and report.engines[_VLLM].startswith("does not load the head in fp4_e2m1")


def test_readings_are_of_formats_that_layouts_hold():
    """One row for each part of a layout in a format; what refuses says why."""
    seen = set()
    for row in engines.READINGS:
        assert len(row.readings) == len(engines.ENGINES)
        for form in row.forms:
            assert form in LAYOUTS[row.layout].stored and (row.layout, row.part, form) not in seen
            seen.add((row.layout, row.part, form))
        assert all(reading.text for reading in row.readings if reading.loads is False)


def test_transformers_is_the_version_of_the_suite():
    constraints = (Path(__file__).parents[3] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f'transformers=={engines.TRANSFORMERS.version}; python_version >= "3.11"' in constraints


def test_the_table_is_in_the_readme():
    readme = Path(engines.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert engines.table() in readme
