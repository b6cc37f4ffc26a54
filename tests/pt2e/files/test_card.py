"""Model cards: metadata as the Hub reads them, and a text whose figures are in the folder."""

import json
import os
import re
import stat
from zipfile import ZipFile

import pytest
import yaml
from huggingface_hub import ModelCard

from pt2mx import MXError
from pt2mx.pt2e.files.card import card, write_card
from pt2mx.pt2e.files.card_metadata import Origin, known_metadata, metadata_of

BASE = "org/Base-1B"
LICENSE = "---\nlicense: apache-2.0\nlanguage:\n- en\nbase_model: org/ancestor\ntags:\n- chat\n---\n# Base\n"


def operand(role="weight", spec="mxfp4_e2m1{32}(even,even)", sqnr=None):
    return {"role": role, "spec": spec, "statistics": None if sqnr is None else {"sqnr": sqnr}}


def operators(*rows):
    return [{"operands": list(operands)} for operands in rows]


REPORT = {
    "operators": operators(
        [operand(sqnr=18.0), operand("activation", "mxfp8_e4m3{32}", 31.5)],
        [operand(sqnr=20.0)],
        [operand(spec="mxfp8_e4m3{32}", sqnr=19.0), operand("activation", None)],
        [operand("activation", None)],
    ),
    "values": 1000,
    "bytes_before": 4000,
    "bytes_after": 600,
}


def write_program(folder, record):
    """Write an archive with a record of the recipe."""
    with ZipFile(folder / "program.pt2", "w") as archive:
        archive.writestr("program/extra/pt2mx.json", record)


@pytest.fixture
def base(tmp_path):
    """The files of a float model."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "README.md").write_text(LICENSE)
    (folder / "LICENSE.txt").write_text("terms")
    (folder / "NOTICE").write_text("notice")
    return folder


@pytest.fixture
def folder(tmp_path):
    """The folder of a quantized language model without its card."""
    path = tmp_path / "base-mxfp4"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (path / "program.pt2").write_bytes(bytes(1234))
    (path / "tokenizer_config.json").write_text("{}")
    (path / "recipe.yaml").write_text("global:\n  weight: mxfp4_e2m1{32}\n")
    (path / "report.json").write_text(json.dumps(REPORT))
    return path


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a checkpoint without its card."""
    path = tmp_path / "base-vllm"
    path.mkdir()
    quantization = {"quant_method": "compressed-tensors"}
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(bytes(2345))
    return path


def test_the_metadata_are_those_of_the_hub(base, folder):
    write_card(folder, [Origin(BASE, True, base)], command="pt2mx quantize")
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert data == {
        "license": "apache-2.0",
        "language": ["en"],
        "base_model": BASE,
        "base_model_relation": "quantized",
        "library_name": "pt2mx",
        "pipeline_tag": "text-generation",
        "tags": ["pt2mx", "mxfp4", "mxfp8"],
        "pt2mx": {"version": data["pt2mx"]["version"], "commands": ["pt2mx quantize"]},
    }
    assert list(metadata_of(folder))[-1] == "pt2mx"


def test_the_text_has_the_figures_of_the_folder(base, folder):
    write_card(folder, [Origin(BASE, True, base)], command="pt2mx quantize --model hf:org/Base-1B --output base-mxfp4")
    text = (folder / "README.md").read_text()
    for line in (
        "# base-mxfp4",
        "[org/Base-1B](https://huggingface.co/org/Base-1B) with weights in MXFP4, MXFP8 and inputs in MXFP8, quantized",
        "pt2mx generate base-mxfp4 --prompt",
        "pt2mx perplexity base-mxfp4 --text book.txt --float org/Base-1B\n",
        'model = LanguageModel.from_pretrained("base-mxfp4")',
        "| files with weights, bytes |  | 1,234 |",
        "| parameters, bytes | 4,000 | 600 |",
        "| bits a parameter, with scales | 32.00 | 4.80 |",
        "3 of 4 operators are quantized. SQNR of their weights: 18.0 to 20.0 dB, median 19.0 dB.",
        "SQNR of their inputs: 31.5 to 31.5 dB",
        "```bash\npt2mx quantize --model hf:org/Base-1B --output base-mxfp4\n```",
        "```yaml\nglobal:\n  weight: mxfp4_e2m1{32}\n```",
        "That of the float model: apache-2.0, [LICENSE.txt](LICENSE.txt), [NOTICE](NOTICE).\n",
    ):
        assert line in text, line
    assert (folder / "LICENSE.txt").read_text() == "terms" and "## Measured" not in text


def test_unknown_figures_are_left_out(folder):
    """Weights that were rounded before have no SQNR; a folder without a report and a recipe no figures but sizes."""
    unknown = {**REPORT, "operators": operators([operand()], [operand(sqnr=None)])}
    unknown["operators"][1]["operands"][0]["statistics"] = {"sqnr": None}
    (folder / "report.json").write_text(json.dumps(unknown))
    assert "SQNR" not in card(folder, {})
    for name in ("report.json", "recipe.yaml", "tokenizer_config.json"):
        (folder / name).unlink()
    write_program(folder, "{}")
    text = card(folder, {})
    size = (folder / "program.pt2").stat().st_size
    assert "A model, quantized by" in text and f"| files with weights, bytes |  | {size:,} |" in text
    for absent in ("license", "base_model", "parameters", "SQNR", "made", "generate(", "null", "None"):
        assert absent not in text, absent


@pytest.mark.parametrize(("record", "is_known"), [('{"recipe": "global: {weight: mxfp4}"}', True), ("[]", False)])
def test_the_recipe_of_a_program_without_a_file(folder, record, is_known):
    (folder / "recipe.yaml").unlink()
    write_program(folder, record)
    assert ("```yaml\nglobal: {weight: mxfp4}\n```" in card(folder, {})) == is_known


def test_an_encoder_has_no_example_of_a_text(checkpoint):
    config = {"architectures": ["BertModel"], "quantization_config": {"quant_method": "quark"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "tokenizer_config.json").write_text("{}")
    text = card(checkpoint, {})
    assert "pipeline_tag" not in text and "ForCausalLM" not in text and "layout quark." in text


def test_a_checkpoint_takes_over_what_its_program_knows(base, folder, checkpoint):
    write_card(folder, [Origin(BASE, True, base)], command="pt2mx quantize")
    text = (folder / "README.md").read_text()
    measured = "  measured:\n  - {what: perplexity, on: a text, here: 12.5}\n"
    (folder / "README.md").write_text(text.replace("---\n\n#", f"{measured}---\n\n#"))
    engines = {"vLLM 0.26.0": "loads it", "transformers 5.24.0": "does not load it: it has no such format"}
    origins = [Origin("Base", False, base), Origin("base-mxfp4", False, folder)]
    write_card(checkpoint, origins, command="pt2mx save-checkpoint", engines=engines, codes=folder)
    data = metadata_of(checkpoint)
    assert (data["library_name"], data["base_model"], data["license"]) == ("transformers", BASE, "apache-2.0")
    assert data["tags"] == ["pt2mx", "mxfp4", "mxfp8", "compressed-tensors"]
    assert data["pt2mx"]["commands"] == ["pt2mx quantize", "pt2mx save-checkpoint"]
    text = (checkpoint / "README.md").read_text()
    assert "compressed-tensors: vLLM 0.26.0 loads it; transformers 5.24.0 does not load it: it has no such" in text
    assert "12.5" in card(folder, known_metadata(folder)) and "12.5" not in text
    assert "vllm serve base-vllm\n" in text and "pip install transformers compressed-tensors\n" in text
    assert "| files with weights, bytes |  | 2,345 |" in text and "parameters, bytes" not in text
    copied = {"LICENSE.txt", "NOTICE", "recipe.yaml", "report.json"}
    assert copied <= {file.name for file in checkpoint.iterdir()}
    write_card(checkpoint, origins, engines={"vLLM 0.26.0": "does not load it: it takes 8 bits alone"})
    assert "vllm serve" not in (checkpoint / "README.md").read_text()


def test_programs_of_ranks(folder):
    """A report is of the first rank, and Python runs in each."""
    for rank in range(2):
        (folder / f"program.rank{rank}of2.pt2").write_bytes(bytes(1000))
    (folder / "program.pt2").unlink()
    text = card(folder, {})
    assert "torchrun --nproc-per-node 2 -m pt2mx generate base-mxfp4 --prompt" in text
    assert "| files with weights, bytes |  | 2,000 |" in text
    assert not any(absent in text for absent in ("parameters, bytes", "perplexity", "generate("))


@pytest.mark.parametrize(
    ("config", "files", "task", "command"),
    [
        ({"vision_config": {}}, ["encoder.pt2"], "image-text-to-text", "--image photo.jpg --prompt"),
        ({"vision_config": {}}, [], "text-generation", '--prompt "What is'),
        (
            {"model_type": "whisper", "is_encoder_decoder": True},
            [],
            "automatic-speech-recognition",
            "--audio speech.wav",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, [], "translation", None),
        ({"model_type": "llama"}, ["chat_template.jinja"], "text-generation", '--chat --prompt "What is'),
    ],
)
def test_each_task_has_its_example(folder, config, files, task, command):
    (folder / "config.json").write_text(json.dumps(config))
    for name in files:
        (folder / name).touch()
    text = card(folder, {"pipeline_tag": "translation"})
    assert f"pipeline_tag: {task}\n" in text
    example = re.search("pt2mx generate base-mxfp4 (.*)", text)
    assert example[1].startswith(command) if command else not example


@pytest.mark.parametrize("own", [{"commands": 5}, {"measured": [{}]}, {"engines": ["vLLM"]}])
def test_metadata_that_were_changed_to_others(checkpoint, own):
    with pytest.raises(MXError, match=r"are not those that pt2mx writes: \w+Error: .*; mend README\.md, or remove it$"):
        card(checkpoint, {"pt2mx": own})


def test_a_readme_of_another_hand_stays(base, folder):
    (folder / "README.md").write_text(LICENSE)
    write_card(folder, [Origin(BASE, True, base)])
    assert (folder / "README.md").read_text() == LICENSE
    assert known_metadata(folder) == {"license": "apache-2.0", "language": ["en"]}


def test_metadata_of_the_user_stay(folder):
    write_card(folder, [])
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("tags:\n", "datasets:\n- org/data\ntags:\n- mine\n"))
    again = yaml.safe_load(card(folder, known_metadata(folder)).split("---\n")[1])
    assert again["datasets"] == ["org/data"] and again["tags"] == ["mine", "pt2mx", "mxfp4", "mxfp8"]


def test_metadata_are_read_as_the_hub_reads_them(folder):
    """`no` is Norwegian, other words of truth are not; a block may end the file."""
    lines = ("---", "language: [no, en]", "inference: false", "base_model: [org/a, org/b]", "pt2mx: {}", "---")
    (folder / "README.md").write_text("\n".join(lines))
    text = card(folder, known_metadata(folder))
    assert "- 'no'\n" in text and "\ninference: false\n" in text and "--float org/a\n" in text


@pytest.mark.parametrize("text", ["no metadata", "---\n: [\n---\n", "---\n- a list\n---\n", "---\npt2mx: text\n---\n"])
def test_broken_metadata_are_none(folder, text):
    (folder / "README.md").write_text(text)
    assert known_metadata(folder) == {}


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_that_the_user_asks_for(base, folder, mask):
    (base / "LICENSE.txt").chmod(0o600)
    before = os.umask(mask)
    try:
        write_card(folder, [Origin(BASE, True, base)])
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((folder / name).stat().st_mode) for name in ("README.md", "LICENSE.txt")}
    assert modes == {0o666 & ~mask}


def test_what_is_no_folder_of_a_model(folder, tmp_path):
    with pytest.raises(MXError, match=r"config\.json': No such file or directory; give the folder of a quantized"):
        card(tmp_path, {})
    for text, fault in {
        "[]": "cannot read .* it holds no JSON object; give a report that `pt2mx quantize` wrote$",
        '{"operators": []}': "is no report that `pt2mx quantize` wrote: it has no bytes_after$",
    }.items():
        (folder / "report.json").write_text(text)
        with pytest.raises(MXError, match=fault):
            card(folder, {})
    for name in ("program.pt2", "report.json"):
        (folder / name).unlink()
    with pytest.raises(MXError, match="holds no quantized model: give a folder that `pt2mx quantize` or `pt2mx sav"):
        card(folder, {})
