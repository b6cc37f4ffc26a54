import json

import pytest
from safetensors import safe_open

from pt2mx import MXError
from pt2mx.pt2e.checkpoints import convert_files
from pt2mx.pt2e.checkpoints.convert_files import MANIFEST, convert_checkpoint
from tests.float_checkpoints import float_checkpoint, of_weights, tensors


def test_files_next_to_the_weights(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "out")
    names = {path.name for path in llama.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert {**config, "quantization_config": None} == {
        **json.loads((llama / "config.json").read_text()),
        "quantization_config": None,
    }
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = {}
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            tensor = file.get_tensor(name)
            sizes[name] = tensor.nbytes
            assert file.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"]) == set(tensors(tmp_path / "out"))


def test_one_file_has_no_index(tmp_path):
    float_checkpoint("llama", tmp_path / "float", shard="1GB")
    convert_checkpoint(tmp_path / "float", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("model*")} == {"model.safetensors"}


def test_an_interrupted_run_goes_on(llama, tmp_path):
    class Stop(Exception):
        pass

    whole, seen = [], []

    def stop(shard, shards):
        whole.append(shard)
        if len(whole) == 2:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert_checkpoint(llama, out, finished=stop)
    assert not (out / "config.json").exists() and (out / MANIFEST).exists()
    kept = {path.name for path in out.glob("model*.safetensors")}
    assert set(whole) <= kept
    partial = out / ".0123456789abcdef.safetensors"  # a killed process leaves it
    partial.write_bytes(b"half")
    stamps = {name: (out / name).stat().st_mtime_ns for name in kept}
    report = convert_checkpoint(llama, out, finished=lambda shard, shards: seen.append(shard))
    assert set(report.kept) == kept and not kept & set(seen)
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == stamps
    assert not partial.exists() and not (out / MANIFEST).exists()
    convert_checkpoint(llama, tmp_path / "at_once")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "at_once").iterdir()
    }


def test_another_conversion_is_not_gone_on_with(llama, tmp_path):
    def stop(shard, shards):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(llama, tmp_path / "out", finished=stop)
    with pytest.raises(MXError, match="unfinished conversion with other settings"):
        convert_checkpoint(llama, tmp_path / "out", of_weights("mxfp8"))
    (tmp_path / "out" / MANIFEST).write_bytes(b"\xff")
    with pytest.raises(MXError, match="unfinished conversion with other settings"):
        convert_checkpoint(llama, tmp_path / "out")
    with pytest.raises(MXError, match="holds files already"):
        convert_checkpoint(llama, llama)


def test_paths_that_are_no_folders(llama, tmp_path):
    with pytest.raises(MXError, match="is no folder"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(MXError, match="must be the path of a folder"):
        convert_checkpoint(llama, None)
    (tmp_path / "file").touch()
    with pytest.raises(MXError, match=r"cannot write to .*/file': File exists"):
        convert_checkpoint(llama, tmp_path / "file")
    with pytest.raises(MXError, match=r"cannot write to .*: embedded null byte; give a folder"):
        convert_checkpoint(llama, f"{tmp_path}/a\0b")


def test_files_of_others_stay(llama, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("notes.txt", ".0123456789abcdef.json"):  # the second as of an interrupted run
        (tmp_path / "out" / name).touch()
    with pytest.raises(MXError, match=r"^'.*/out' holds files already: give a new folder$"):
        convert_checkpoint(llama, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_folders_inside_are_copied(llama, tmp_path):
    for name in ("1_Pooling/config.json", "original/consolidated.pth", ".cache/lock", "pytorch_model.bin"):
        (llama / name).parent.mkdir(exist_ok=True)
        (llama / name).write_text(name)
    out = llama / "quantized"
    convert_checkpoint(llama, out)
    assert (out / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    assert not {"original", ".cache", "quantized", "pytorch_model.bin"} & {path.name for path in out.iterdir()}


def test_the_manifest_is_of_this_version(llama, tmp_path):
    seen = {}

    def look(shard, shards):
        seen.update(json.loads((tmp_path / "out" / MANIFEST).read_text()))

    convert_checkpoint(llama, tmp_path / "out", finished=look)
    assert seen["pt2mx"] == convert_files.__version__ and len(seen["formats"]) == 15
