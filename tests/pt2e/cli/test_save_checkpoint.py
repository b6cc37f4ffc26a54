"""From a float checkpoint to one that is MX, and from that to a folder that generates."""

import pytest
import torch
import transformers

from pt2mx import LanguageModel
from pt2mx.pt2e.cli.command import main
from tests.language_models import checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint in bfloat16, "float", what `pt2mx quantize` makes of it, and the MX checkpoint."""
    path = tmp_path_factory.mktemp("checkpoints")
    checkpoint("llama", path / "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "tiny", dtype=torch.bfloat16)
    model.save_pretrained(path / "float")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / "tiny" / name).exists():
            (path / "float" / name).write_bytes((path / "tiny" / name).read_bytes())
    options = ["--recipe", "mxfp4_weight_only", "--output", str(path / "quantized")]
    assert main(["quantize", "--model", f"hf:{path / 'float'}", *options]) == 0
    saved = ["--float", str(path / "float"), "--output", str(path / "mx"), "--unpack", ".*embed_tokens", "lm_head"]
    assert main(["save-checkpoint", str(path / "quantized"), *saved]) == 0
    return path


def test_codes_go_out_and_in_to_the_bit(place, capsys):
    assert main(["quantize", "--model", f"hf:{place / 'mx'}", "--output", str(place / "again")]) == 0
    assert "bits a value" in capsys.readouterr().out
    before, after = (LanguageModel.from_pretrained(place / name).program.state_dict for name in ("quantized", "again"))
    codes = {name.split("layers")[-1]: t for name, t in before.items() if "layers" in name and name.endswith("_data")}
    found = {name.split("layers")[-1]: t for name, t in after.items() if "layers" in name and t.dtype == torch.uint8}
    assert codes and all(any(torch.equal(tensor, other) for other in found.values()) for tensor in codes.values())
    stock = transformers.AutoModelForCausalLM.from_pretrained(place / "mx")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        want = stock(ids).logits
        # the language model multiplies codes, in another order
        assert torch.allclose(LanguageModel.from_pretrained(place / "again")(ids).logits, want, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quantize", "--model", "hf:mx", "--recipe", "mxfp4", "--output", "o"], "leave --recipe out"),
        (["quantize", "--model", "hf:mx", "--output", "mx"], "is the folder of the checkpoint"),
        (["quantize", "--model", "hf:float", "--output", "o"], "give --recipe, a YAML file or one of"),
        (["save-checkpoint", "quantized", "--float", "float", "--output", "mx", "--unpack", ".*"], "is there already"),
        (["save-checkpoint", "nowhere", "--float", "float", "--output", "o"], "holds no program"),
        (["save-checkpoint", "quantized", "--float", "nowhere", "--output", "o"], "nowhere"),
    ],
)
def test_errors(place, arguments, text, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") <= 2 and not (place / "o").exists()
