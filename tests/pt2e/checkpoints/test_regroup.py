"""Experts of gpt-oss in one tensor, and as linear layers: the same codes, from file to file and through a program."""

import json

import pytest
import torch
from safetensors.torch import save_file

from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
from pt2mx.pt2e.checkpoints.engines import TRANSFORMERS
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.checkpoints.save import save_checkpoint
from pt2mx.pt2e.cli.command import main
from tests.float_checkpoints import float_checkpoint, load_packed_model, of_weights, tensors
from tests.language_models import transformers

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A checkpoint in the layout of gpt-oss, in several shards."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    float_checkpoint("gpt_oss", folder / "float")
    convert_checkpoint(folder / "float", folder / "fused", "mxfp4_weight_only", layout="mxfp4")
    return folder / "fused"


def assert_same(first, second):
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)), name


def test_each_expert_has_every_second_row(fused, tmp_path):
    convert_checkpoint(fused, tmp_path / "ct")
    one, layers = tensors(fused), tensors(tmp_path / "ct")
    for i, layer in enumerate(("gate_proj", "up_proj")):
        name = f"{EXPERTS}.3.{layer}"
        codes = one[f"{EXPERTS}.gate_up_proj_blocks"][3, i::2]
        assert torch.equal(layers[f"{name}.weight_packed"], codes.flatten(-2))
        assert torch.equal(layers[f"{name}.weight_scale"], one[f"{EXPERTS}.gate_up_proj_scales"][3, i::2])
        assert torch.equal(layers[f"{name}.bias"], one[f"{EXPERTS}.gate_up_proj_bias"][3, i::2])
    assert torch.equal(layers[f"{EXPERTS}.1.down_proj.bias"], one[f"{EXPERTS}.down_proj_bias"][1])
    group = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["targets"] == [r"re:.*\.experts\..*"] and group["format"] == "mxfp4-pack-quantized"


def test_there_and_back(fused, tmp_path, logits):
    """MXFP4 of gpt-oss -> NVFP4 of ModelOpt -> NVFP4 and MXFP4 of compressed-tensors -> MXFP4 of gpt-oss."""
    expected = logits(load_packed_model(fused))
    chain = [("fused", "nv", "modelopt"), ("nv", "ct", "compressed-tensors"), ("ct", "back", "mxfp4"),
             ("fused", "mx", "compressed-tensors"), ("mx", "back2", "mxfp4")]  # fmt: skip
    for source, output, layout in chain:
        convert_checkpoint(fused if source == "fused" else tmp_path / source, tmp_path / output, layout=layout)
        assert torch.equal(logits(load_packed_model(tmp_path / output)), expected)
    assert_same(fused, tmp_path / "back")
    assert_same(fused, tmp_path / "back2")
    written = tensors(tmp_path / "ct")
    gate, up = (written[f"{EXPERTS}.0.{name}.weight_global_scale"] for name in ("gate_proj", "up_proj"))
    assert torch.equal(gate, up) and gate.log2().frac() == 0


@pytest.mark.slow
def test_through_a_program(fused, tmp_path):
    convert_checkpoint(fused, tmp_path / "ct")
    program = load_checkpoint(tmp_path / "ct")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(program.config)
    for source, layout in ((tmp_path / "ct", "compressed-tensors"), (fused, "mxfp4")):
        save_checkpoint(program, model, tmp_path / layout, layout)
        assert_same(source, tmp_path / layout)


@pytest.mark.parametrize("missing", ["weight_scale", "weight_packed", "bias"])
def test_a_missing_part_leaves_nothing(fused, tmp_path, capsys, missing):
    convert_checkpoint(fused, tmp_path / "ct")
    source, name = tmp_path / "ct", f"{EXPERTS}.2.up_proj.{missing}"
    merged = tensors(source)
    del merged[name]
    for path in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        path.unlink()
    save_file(merged, source / "model.safetensors", {"format": "pt"})
    assert main(["convert-checkpoint", str(source), str(tmp_path / "out"), "--layout", "mxfp4"]) == 2
    assert f"holds no {name}" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_layers_that_libraries_fuse_share_a_tensor_scale(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4"))
    convert_checkpoint(tmp_path / "mx", tmp_path / "nv", layout="modelopt")
    written = tensors(tmp_path / "nv")
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        assert len({written[f"model.layers.0.{name}.weight_scale_2"].item() for name in names}) == 1


@pytest.mark.compiled
def test_experts_keep_tensor_scales_of_their_own(tmp_path):
    convert_checkpoint(
        float_checkpoint("mixtral", tmp_path / "float"), tmp_path / "nv", of_weights("nvfp4"), layout="modelopt"
    )
    written = tensors(tmp_path / "nv")
    names = [f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight_scale_2" for i in range(4)]
    assert len({written[name].item() for name in names}) == 4
    program = load_checkpoint(tmp_path / "nv")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(program.config)
    save_checkpoint(program, model, tmp_path / "again", "modelopt")
    assert_same(tmp_path / "nv", tmp_path / "again")


@torch.no_grad()
def test_transformers_reads_nvfp4_experts_whose_tensor_scale_is_1(tmp_path, logits):
    source = float_checkpoint("mixtral", tmp_path / "float")
    convert_checkpoint(source, tmp_path / "mx", of_weights("mxfp4"))
    convert_checkpoint(tmp_path / "mx", tmp_path / "nv", weights="nvfp4")
    written = tensors(tmp_path / "nv")
    assert written["model.layers.0.block_sparse_moe.experts.0.w1.weight_global_scale"].tolist() == [1]
    assert written["model.layers.0.self_attn.o_proj.weight_global_scale"].item() > 1
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("mx", "nv")]
    models.append(load_packed_model(tmp_path / "nv"))
    assert len({tuple(logits(model).flatten().tolist()) for model in models}) == 1
    convert_checkpoint(tmp_path / "nv", tmp_path / "back", weights="mxfp4")
    assert_same(tmp_path / "mx", tmp_path / "back")
    convert_checkpoint(tmp_path / "mx", tmp_path / "modelopt", layout="modelopt")
    report = convert_checkpoint(tmp_path / "modelopt", tmp_path / "out")
    assert report.engines[str(TRANSFORMERS)].startswith("does not load experts in nvfp4 (its values are wrong")
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(models[-1]))


def test_formats_without_an_equal(llama, tmp_path, capsys):
    mx, out = str(tmp_path / "mx"), str(tmp_path / "out")
    convert_checkpoint(llama, mx, of_weights("mxfp4"))
    for arguments, text in (
        ([mx, out, "--weights", "mxfp8"], "q_proj.weight in fp4_e2m1 has no equal in fp8_e4m3 of compressed-tensors"),
        ([mx, out, "--weights", "mxint8"], "compressed-tensors has no weights in mxint8: it has fp4_e2m1, "),
        ([mx, out, "--weights", "nvfp5"], "unknown element format in 'nvfp5': did you mean 'nvfp4'?"),
        ([str(llama), out, "--weights", "nvfp4"], "(--weights) is for codes: "),
    ):
        assert main(["convert-checkpoint", *arguments]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") <= 2 and not (tmp_path / "out").exists()
