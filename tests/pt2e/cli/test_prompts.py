"""Prompts with images, on the command line."""

import json

import pytest
from PIL import Image

from pt2mx import LanguageModel, MXError
from pt2mx.pt2e.cli import language
from pt2mx.pt2e.cli.prompts import image_prompt, images_in
from tests.vision_language_models import llava_processor, vision_language_checkpoint

_QUANTIZE = ["quantize", "--model", "hf:vlm", "--recipe", "mxfp4_weight_only"]
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{{ part.text if part.text else '<image>' }}"
    "{% endfor %}{% endfor %}!"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint, "vlm", an image, "red.png", and what `pt2mx quantize` makes of both."""
    path = tmp_path_factory.mktemp("images")
    vision_language_checkpoint("llava", path / "vlm")
    llava_processor().save_pretrained(path / "vlm")
    Image.new("RGB", (50, 40), (200, 10, 30)).save(path / "red.png")
    (path / "text.png").write_text("no image")
    return path


@pytest.mark.slow
def test_a_model_with_its_vision_tower(run):
    status, out, _ = run(*_QUANTIZE, "--output", "both")
    assert status == 0 and "the program holds 100% of the checkpoint's" in out
    with open("both/report.json") as file:
        modules = [row["module"] for row in json.load(file)["operators"]]
    assert any("vision_tower" in name for name in modules) and any("language_model" in name for name in modules)
    generate = ["generate", "both", "--prompt", "hello", "--max-new-tokens", "8", "--json"]
    status, out, _ = run(*generate, "--image", "red.png")
    (answer,) = json.loads(out)["answers"]
    loaded, image = LanguageModel.from_pretrained("both"), Image.open("red.png")
    options = {"max_new_tokens": 8, "do_sample": False}
    assert status == 0 and answer["text"] == loaded.generate(text="<image>hello", images=[image], **options)
    assert loaded.generate(text="<image>hello", images=[image.convert("L").convert("RGB")], **options) != answer["text"]
    for file, text in (("text.png", "is no image"), ("nothing.png", "no file or folder 'nothing.png': give an image")):
        status, _, err = run(*generate, "--image", file)
        assert status == 2 and text in err and err.count("\n") == 1
    status, _, err = run(*generate, "--image", "red.png", "--chat")
    assert status == 2 and "no chat template" in err
    with pytest.raises(MXError, match="images belong to text"):
        loaded.generate(images=[image])


@pytest.mark.compiled
def test_a_model_of_text_alone(run):
    status, out, _ = run(*_QUANTIZE, "--output", "text", "--part", "language_model")
    assert status == 0 and "vision_tower 0%" in out
    status, _, err = run("generate", "text", "--prompt", "hello", "--image", "red.png")
    assert status == 2 and "holds no vision-language model" in err
    status, _, _ = run("generate", "text", "--prompt", "hello", "--max-new-tokens", "2")
    assert status == 0


def test_distillation_refuses_a_tower_before_it_writes_text(run, monkeypatch, tmp_path):
    (tmp_path / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    monkeypatch.setattr(language, "generate_lessons", lambda *given: pytest.fail("the model writes"))
    status, _, err = run(*_QUANTIZE, "--output", "o", "--distill", str(tmp_path / "long.txt"), "--distill-generated")
    assert status == 2 and "for models without a vision tower" in err, err


def test_images_come_before_the_text_unless_the_prompt_says_where(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "b.png")
    Image.new("RGB", (32, 32), (255, 255, 255)).save(tmp_path / "a.jpg")
    (tmp_path / "text.txt").write_text("no image")
    processor, images = llava_processor(), images_in(str(tmp_path))
    assert [image.getpixel((0, 0))[0] for image in images] == [255, 0]
    four = 4 * "<image>"

    def text(*arguments):
        given = image_prompt(processor, *arguments)
        assert len(given["pixel_values"]) == len(arguments[1])
        return processor.tokenizer.decode(given["input_ids"][0])

    assert text("hi", images) == f"{four}{four}hi"
    assert text("a<image>b", images[:1]) == f"a{four}b"
    processor.chat_template = _TEMPLATE
    assert text("hi", images) == f"{four}{four}hi!"
    assert text("hi", images, False) == f"{four}{four}hi"
