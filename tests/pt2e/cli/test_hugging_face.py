import json
from pathlib import Path

import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.cli.hugging_face import load_checkpoint
from pt2mx.pt2e.cli.models import load_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8, **SMALL}
TEXT = {"vocab_size": 99, **SMALL}


def rewrite(folder: str, *removed: str, **fields) -> None:
    file = Path(folder) / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in removed}
    file.write_text(json.dumps(config | fields))


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "config", "fields"),
    [("ViTModel", "ViTConfig", IMAGE), ("BertModel", "BertConfig", TEXT)],
    ids=["ViT", "BERT"],
)
def test_shards_load_in_their_own_dtype(name, config, fields, dtype, stated, checkpoint, transformers):
    folder = checkpoint(name, config, fields, dtype=dtype, max_shard_size="20KB")
    assert len(list(Path(folder).glob("model-*-of-*.safetensors"))) > 1
    if not stated:
        rewrite(folder, "dtype")
    loaded = load_model(f"hf:{folder}")
    expected = getattr(transformers, name).from_pretrained(folder).state_dict()
    result = loaded.module.state_dict()
    assert result.keys() == expected.keys() and all(torch.equal(result[key], expected[key]) for key in expected)
    floats = [*loaded.module.parameters(), *loaded.example.values()]
    assert {t.dtype for t in floats if t.is_floating_point()} == {getattr(torch, dtype)}
    with torch.no_grad():
        assert loaded.module(**loaded.example)[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("fields", "files"),
    [
        ({"model_type": "mine", "architectures": ["Mine"]}, "configuration_mine.py, modeling_mine.py"),
        ({"architectures": ["Mine"]}, "configuration_mine.py, modeling_mine.py"),  # transformers knows only the config
    ],
)
def test_code_of_a_checkpoint_is_not_run(fields, files, checkpoint):
    folder = checkpoint("ViTModel", "ViTConfig", IMAGE)
    code = {"AutoConfig": "configuration_mine.MineConfig", "AutoModel": "someone/mine--modeling_mine.Mine"}
    rewrite(folder, **fields, auto_map=code)
    for name in ("configuration_mine.py", "modeling_mine.py"):
        (Path(folder) / name).write_text("raise SystemExit('it ran')")
    with pytest.raises(MXError, match=f"checkpoint' needs code of its own, which is not run: .*{files[-8:]}.*factory"):
        load_checkpoint(folder)


def test_code_that_transformers_has_itself_is_not_needed(checkpoint):
    folder = checkpoint("ViTModel", "ViTConfig", IMAGE)
    rewrite(folder, auto_map={"AutoConfig": "configuration_vit.ViTConfig", "AutoModel": "modeling_vit.ViTModel"})
    assert type(load_checkpoint(folder)).__module__.startswith("transformers.")


def test_no_checkpoint(tmp_path):
    with pytest.raises(MXError, match="is no Hugging Face checkpoint that can be loaded"):
        load_checkpoint(str(tmp_path))
