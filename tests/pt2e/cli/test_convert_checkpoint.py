import json

import pytest
import torch

from pt2mx.pt2e.cli.command import main
from tests.language_models import tiny_decoder, transformers


@pytest.fixture
def llama(tmp_path):
    tiny_decoder("llama").bfloat16().save_pretrained(tmp_path / "float", max_shard_size="20KB")
    return str(tmp_path / "float")


def test_a_checkpoint_is_converted(llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert-checkpoint", llama, out, "--recipe", "mxfp4_weight_only", "--jobs", "2"]) == 0
    printed, notes = capsys.readouterr()
    assert printed.splitlines()[0] == "mxfp4_e2m1{32}(even,even): 15 tensors"
    assert printed.splitlines()[1].startswith(f"{out}: 0.1 MB (the float checkpoint: 0.2 MB); convert ")
    assert "in high precision: model.embed_tokens.weight: readers of compressed-tensors keep" in notes
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded(torch.arange(40)[None]).logits.isfinite().all()


def test_layout_and_dtype(tmp_path):
    tiny_decoder("gpt_oss").save_pretrained(tmp_path / "float")
    arguments = [str(tmp_path / "float"), str(tmp_path / "out"), "--layout", "mxfp4", "--dtype", "bfloat16"]
    assert main(["convert-checkpoint", *arguments]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4" and config["dtype"] == "bfloat16"


def test_many_tensors_of_one_reason_are_counted(tmp_path, capsys):
    tiny_decoder("gpt_oss").bfloat16().save_pretrained(tmp_path / "float")
    assert main(["convert-checkpoint", str(tmp_path / "float"), str(tmp_path / "out"), "--layout", "mxfp4"]) == 0
    assert "and 6 more: mxfp4 has experts alone" in capsys.readouterr().err


def test_bad_input_is_one_line(llama, tmp_path, capsys):
    out = str(tmp_path / "out")
    for arguments, message in [
        ([str(tmp_path / "none"), out], "is no folder: give that of a checkpoint"),
        ([llama, llama], "holds files already: give a new folder"),
        ([llama, out, "--recipe", "mxint8"], "compressed-tensors cannot hold"),
        ([llama, out, "--recipe", "mxfp5"], "no recipe 'mxfp5'"),
        ([llama, out, "--jobs", "0"], "jobs=0"),
        ([llama, out, "--dtype", "fp7"], "dtype='fp7'"),
    ]:
        assert main(["convert-checkpoint", *arguments]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and error.startswith("pt2mx: error: ") and "\n" not in error
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as exit:
        main(["convert-checkpoint", llama, out, "--layout", "gguf"])
    assert exit.value.code == 2
