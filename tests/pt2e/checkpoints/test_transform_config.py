"""Rotations of inputs as compressed-tensors states them (`transform_config`), written and read."""

import copy
import json
import re

import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from compressed_tensors.transform.utils.hadamard import random_hadamard_matrix
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, convert_checkpoint, save_checkpoint
from pt2mx.pt2e.checkpoints.engines import TRANSFORMERS, VLLM
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.checkpoints.transform_config import read
from tests.float_checkpoints import load_packed_model
from tests.language_models import transformers
from tests.pt2e.checkpoints.conftest import INPUTS

FP4 = "mxfp4(even)"
LAYERS = {".*_proj": (FP4, FP4)}
#: with blocks of two sizes
ALL = {".*[qkvo]_proj|.*lm_head": (FP4, None), ".*mlp.*": ("nvfp4(mse)", None)}
Q = "model.layers.0.self_attn.q_proj"


def entry(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]["transform_config"]


def with_transforms(folder):
    """Load a checkpoint with transformers, and apply `transform_config`, which it leaves out, by compressed-tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = TransformConfig(**entry(folder))
    for group in config.config_groups.values():
        group.apply = [where for where in group.apply if where.is_online()]
    apply_transform_config(model, config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


@pytest.fixture
def rotated(bf16, convert, quantizer):
    """Return a quantized model whose inputs are rotated, and its float model."""

    def make(settings, family="llama", **fields):
        source = bf16(family, **fields)
        algorithms = {"rotation": {}, "scale_search": None}
        graph = pt2mx.optimize(source.graph, quantizer(settings).set_algorithms(algorithms), [INPUTS])
        return convert(graph, settings), source.model

    return make


@pytest.mark.compiled_except("settings0-*")
@torch.no_grad()
@pytest.mark.parametrize(
    ("settings", "fields", "sizes"),
    [(LAYERS, {}, {32}), (ALL, {"tie_word_embeddings": False}, {16, 32}), (LAYERS, {"attention_bias": True}, {32})],
)
def test_rotated_inputs(rotated, logits, tmp_path, settings, fields, sizes):
    """compressed-tensors computes the bits of the converted model; transformers alone computes something else."""
    converted, model = rotated(settings, **fields)
    report = save_checkpoint(converted, model, tmp_path / "out")
    want = logits(converted)
    assert torch.equal(logits(with_transforms(tmp_path / "out")), want)
    without = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (without - want).norm() > 0.3 * want.norm()
    assert report.engines[str(TRANSFORMERS)].startswith("does not load linear layers with rotated inputs")
    assert ("no inputs of heads" in report.engines[str(VLLM)]) == (settings is ALL)
    assert report.engines[str(VLLM)].startswith("was not tried with linear layers with rotated inputs")
    assert {group["head_dim"] for group in entry(tmp_path / "out")["config_groups"].values()} == sizes
    loaded = load_packed_model(tmp_path / "out")
    assert torch.equal(logits(loaded), want)
    assert not [name for name, _ in loaded.named_buffers() if "matrix" in name]


@pytest.mark.compiled
@torch.no_grad()
def test_a_program_with_matrices_of_the_file(edited, logits, tmp_path):
    tensors = {f"{Q}.v_input.weight": _random(32), f"{Q}.v_output.weight": _random(32)}
    folder = edited(
        {"v": _group("random-hadamard", _at("input", Q), _at("output", Q, inverse=True), head_dim=32)}, tensors
    )
    loaded = load_checkpoint(folder)
    want = logits(load_packed_model(folder), mask=True)
    assert torch.equal(logits(loaded), want)
    loaded.save_pretrained(tmp_path / "program")
    assert torch.equal(logits(pt2mx.LanguageModel.from_pretrained(tmp_path / "program")), want)


@torch.no_grad()
@pytest.mark.compiled
def test_a_loaded_program_is_saved_again(rotated, tmp_path):
    converted, model = rotated(LAYERS)
    save_checkpoint(converted, model, tmp_path / "first")
    loaded = load_checkpoint(tmp_path / "first")
    save_checkpoint(loaded, model, tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert entry(tmp_path / "first") == entry(tmp_path / "second")
    with pytest.raises(MXError, match=r"multiplies inputs or outputs as the model runs \(transform_config\), which a"):
        convert_checkpoint(tmp_path / "first", tmp_path / "third", layout="modelopt", weights="nvfp4")


@pytest.fixture
def edited(bf16, convert, tmp_path):
    """Write a checkpoint without rotations, then state groups of transforms and add their tensors."""

    def make(groups, tensors):
        source = bf16("llama")
        save_checkpoint(convert(source.graph, LAYERS), source.model, tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        config["quantization_config"]["transform_config"] = {"config_groups": groups}
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        file = tmp_path / "out" / "model.safetensors"
        save_file({**load_file(file), **tensors}, file, {"format": "pt"})
        return tmp_path / "out"

    return make


def _group(kind, *where, **fields):
    return {"type": kind, "apply": list(where), **fields}


def _at(location, targets="Linear", **fields):
    return {"location": location, "targets": targets, **fields}


def _random(size, seed=0):
    return random_hadamard_matrix(size, torch.float32, gen=torch.Generator().manual_seed(seed))


_PERM = torch.randperm(16, generator=torch.Generator().manual_seed(0))
_MLP = "model.layers.0.mlp"


@pytest.mark.compiled_except("groups0-*", "groups4-*")
@torch.no_grad()
@pytest.mark.parametrize(
    ("groups", "tensors"),
    [
        ({"u": _group("hadamard", _at("input"), _at("weight_input", inverse=True), head_dim=16)}, {}),
        ({"u": _group("hadamard", _at("output", "re:.*_proj", ignore=["re:.*mlp.*", Q]))}, {}),
        # one matrix for all modules of a group, once in the file
        ({"R4": _group("random-hadamard", _at("input", [f"{_MLP}.up_proj", "lm_head"]))},
         {"lm_head.R4_input.weight": _random(64)}),
        ({"v": _group("random-hadamard", _at("input", Q, inverse=True), _at("output", Q), head_dim=32)},
         {f"{Q}.v_input.weight": _random(32), f"{Q}.v_output.weight": _random(32)}),
        ({"v": _group("random-hadamard", _at("input", Q), head_dim=16, randomize=True)},
         {f"{Q}.v_input.weight": _random(16), f"{Q}.v_input.perm": _PERM}),
        # the last group comes first
        ({"a": _group("hadamard", _at("input", Q)), "b": _group("random-hadamard", _at("input", Q), head_dim=8)},
         {f"{Q}.b_input.weight": _random(8)}),
    ],
)  # fmt: skip
def test_what_compressed_tensors_writes(edited, logits, groups, tensors):
    folder = edited(groups, tensors)
    want, got = logits(with_transforms(folder)), logits(load_packed_model(folder))
    assert (got - want).norm() < 5e-3 * want.norm()
    without = logits(transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert (without - want).norm() > 0.03 * want.norm()


def test_transforms_of_weights_alone_are_in_the_weights(edited, logits):
    at = _at("weight_output", "re:.*v_proj"), _at("weight_input", "re:.*o_proj", inverse=True)
    folder = edited({"R2": _group("random-matrix", *at, head_dim=16)}, {})
    with torch.no_grad():
        want = logits(transformers.AutoModelForCausalLM.from_pretrained(folder))
        assert torch.equal(logits(load_packed_model(folder)), want)


@pytest.mark.parametrize(
    ("group", "tensors", "text"),
    [
        (_group("random-matrix", _at("input")), {}, "g of transform_config has the type 'random-matrix'"),
        (_group("hadamard", _at("k_cache", "re:.*self_attn$"), head_dim=16), {}, "the location 'k_cache', which pt2mx"),
        (_group("hadamard", _at("q_attn", "re:.*self_attn$"), head_dim=16), {}, "the location 'q_attn', which pt2mx"),
        (_group("hadamard", _at("output", "re:.*self_attn$"), head_dim=16), {}, "self_attn, a LlamaAttention, which"),
        (_group("hadamard", _at("output", "Embedding")), {}, "model.embed_tokens, a Embedding, which pt2mx does not"),
        (_group("hadamard", _at("input"), head_dim=-32), {}, "blocks of -32 (head_dim): expected a number of values"),
        (_group("hadamard", {"targets": "Linear"}), {}, "the location None, which pt2mx does not read"),
        (["hadamard"], {}, "['hadamard'] in transform_config is no mapping"),
        (_group("hadamard", _at("input", "re:.*query$")), {}, "multiplies the input of no module of the model"),
        (_group("hadamard", _at("input"), head_dim=48), {}, "blocks of 48, which do not divide 64 values"),
        (_group("hadamard", _at("output", "lm_head")), {}, "a Hadamard matrix of 300 values, no power of two"),
        (_group("random-hadamard", _at("input", Q)), {}, f"holds no {Q}.g_input.weight of 64 x 64 values"),
        (_group("random-hadamard", _at("input", Q)), {f"{Q}.g_input.weight": _random(32)}, "has the shape (32, 32)"),
    ],
)
def test_what_is_not_read(edited, group, tensors, text):
    with pytest.raises(MXError, match=re.escape(text)):
        load_packed_model(edited({"g": group}, tensors))


def test_a_config_without_groups():
    assert read({}) == read({"transform_config": None}) == read({"transform_config": {"config_groups": {}}}) == ()


@pytest.mark.compiled_cases("gpt_oss-*", "llama-quark-*")
@pytest.mark.parametrize(
    ("family", "layout", "modules", "options", "text"),
    [
        ("llama", "quark", "q_proj", {}, f"{Q} rotates its inputs, for which only linear layers of compressed-tensors"),
        (
            "llama",
            "gguf",
            "q_proj",
            {},
            f"{Q} rotates its inputs, for which only .* have a place: give this layout, or",
        ),
        (
            "gpt_oss",
            None,
            "experts",
            {},
            "experts rotates its inputs, for which only .* have a place: optimize without",
        ),
        ("llama", None, "q_proj", {"unpack": [".*q_proj"]}, f"unpack: inputs of {Q}.weight are rotated, which a"),
    ],
)
def test_what_cannot_be_written(rotated, tmp_path, family, layout, modules, options, text):
    converted, model = rotated({f".*{modules}": (FP4, None)}, family)
    with pytest.raises(MXError, match=text):
        save_checkpoint(converted, model, tmp_path / ("out.gguf" if layout == "gguf" else "out"), layout, **options)


def test_rotated_values_that_others_read(rotated, tmp_path):
    """They are no inputs of linear layers alone."""
    converted, model = rotated({".*q_proj": (FP4, None)})
    converted = copy.deepcopy(converted)
    (rotation,) = converted.graph.find_nodes(op="call_function", target=torch.ops.pt2mx.hadamard.default)
    with converted.graph.inserting_after(rotation):
        converted.graph.call_function(torch.ops.aten.relu.default, (rotation,))
    with pytest.raises(MXError, match=r"calls pt2mx\.hadamard for what is neither .* optimize without Rotation, as"):
        save_checkpoint(converted, model, tmp_path / "out")
