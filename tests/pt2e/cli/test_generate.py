"""`pt2mx generate`: conversations, batches, stop texts, files of prompts, and the answers of the float model."""

import io
import json

import pytest

from pt2mx import LanguageModel
from pt2mx.pt2e.cli.command import main
from tests.language_models import checkpoint, transformers

LENGTH = ("--max-new-tokens", "8")
FROM_PRETRAINED = LanguageModel.from_pretrained
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint, "llama", and its quantized model with a chat template, "quantized"."""
    path = tmp_path_factory.mktemp("generate")
    name = checkpoint("llama", path / "llama", num_hidden_layers=1, initializer_range=0.3)
    output = str(path / "quantized")
    assert main(["quantize", "--model", f"hf:{name}", "--recipe", "mxint8", "--output", output]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(output)
    return path


@pytest.fixture(scope="module")
def model(place):
    return LanguageModel.from_pretrained(place / "quantized")


@pytest.fixture(autouse=True)
def loaded_once(model, monkeypatch):
    monkeypatch.setattr(LanguageModel, "from_pretrained", lambda *arguments: model)


@pytest.fixture
def texts(run):
    """Return the texts of the answers."""

    def texts(*arguments):
        status, out, err = run("generate", "quantized", *LENGTH, *arguments, "--json")
        assert status == 0, err
        return [row["text"] for row in json.loads(out)["answers"]]

    return texts


def said(model, prompt):
    return model.generate(text=prompt, max_new_tokens=8, do_sample=False)


def test_prompts_of_the_command_line_are_one_batch(run, model, texts, place):
    (place / "long.txt").write_text("A longer prompt,\nof two lines\n")
    prompts = ["Hello", "A longer prompt,\nof two lines"]
    arguments = ("--prompt", prompts[0], "--prompt-file", "long.txt")
    expected = [said(model, prompt) for prompt in prompts]
    assert texts(*arguments) == expected and len(set(expected)) == 2
    status, out, err = run("generate", "quantized", *LENGTH, *arguments)
    assert status == 0 and err.count("first token after") == 1
    assert out == "".join(f"> {prompt}\n{text}\n" for prompt, text in zip(prompts, expected, strict=True))


def test_lines_of_a_conversation_are_its_turns(model, texts, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nWhy?\n"))
    first, second = texts("--chat", "--system", "Be brief.")
    begun = "<system>Be brief.<user>Hello<assistant>"
    assert first == said(model, begun)
    assert second == said(model, f"{begun}{first}<user>Why?<assistant>") != said(model, "<user>Why?<assistant>")


def test_a_model_reads_each_turn_once(model, texts, monkeypatch):
    lengths, inputs_of = [], LanguageModel._inputs_of

    def recording(self, input_ids, *arguments):
        lengths.append(input_ids.shape[1])
        return inputs_of(self, input_ids, *arguments)

    monkeypatch.setattr(LanguageModel, "_inputs_of", recording)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello there, my friend\nWhy?\nOh\n"))
    answers = texts("--chat")
    first, second, third = (length for length in lengths if length > 1)
    whole, texts_so_far = [], ""
    for question, said_then in zip(("Hello there, my friend", "Why?", "Oh"), answers, strict=True):
        texts_so_far += f"<user>{question}<assistant>"
        whole.append(len(model.tokens([texts_so_far])["input_ids"][0]))
        texts_so_far += said_then
    assert first == whole[0] and second <= whole[1] - whole[0] and third <= whole[2] - whole[1]


def test_prompts_of_a_chat_do_not_know_each_other(model, texts):
    expected = [said(model, f"<user>{prompt}<assistant>") for prompt in ("Hello", "Why is it?")]
    assert texts("--chat", "--prompt", "Hello", "--prompt", "Why is it?") == expected


def test_a_stop_text_ends_an_answer(run, model, texts):
    whole = said(model, "Hello")
    stop = whole[2:4]
    end = whole.index(stop)
    assert texts("--prompt", "Hello", "--stop", stop, "--stop", "never there") == [whole[:end]]
    assert run("generate", "quantized", *LENGTH, "--prompt", "Hello", "--stop", stop)[1] == f"{whole[:end]}\n"
    assert texts("--prompt", "Hello", "--prompt", "Hello", "--stop", stop) == [whole[:end]] * 2


def test_an_answer_that_ends_at_the_last_position(run, model, monkeypatch):
    """An answer may be shorter than it is by default; more tokens than there is room for are refused at once."""
    count = model.tokens(["Hello"])["input_ids"].shape[1]
    monkeypatch.setattr(model, "_limits", {"position_ids": count + 4})
    status, out, err = run("generate", "quantized", "--prompt", "Hello", "--json")
    (row,) = json.loads(out)["answers"]
    assert status == 0 and row["tokens"] == 5 and row["text"] and "ends after 5 tokens at the latest: the model" in err
    status, out, err = run("generate", "quantized", "--prompt", "Hello", "--json", *LENGTH)
    assert (status, out) == (2, "") and "8 new ones are asked for" in err and "--max-new-tokens 5 or less" in err


def test_a_conversation_ends_at_the_last_position(run, model, monkeypatch):
    count = model.tokens(["<user>Hello<assistant>"])["input_ids"].shape[1]
    monkeypatch.setattr(model, "_limits", {"position_ids": count + 3})
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nWhy?\n"))
    status, out, err = run("generate", "quantized", "--chat", "--json", *LENGTH)
    (row,) = json.loads(out)["answers"]
    assert status == 0 and row["tokens"] == 4 and f"it is longer than the {count + 3} positions of the model" in err


def test_one_token_is_singular(run, model, monkeypatch):
    monkeypatch.setattr(model, "_limits", {"position_ids": model.tokens(["Hello"])["input_ids"].shape[1]})
    status, _, err = run("generate", "quantized", "--prompt", "Hello")
    assert status == 0 and "ends after 1 token at the latest" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_line_that_is_too_long_leaves_the_answers_before_it(run, model, place, monkeypatch, as_json):
    expected = said(model, "Hello")
    monkeypatch.setattr(model, "_limits", {"position_ids": 30})
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Hello\n{'l' * 50}\nWhy?\n"))
    arguments = ("--output", "so_far.txt", *(("--json",) if as_json else ()))
    status, out, err = run("generate", "quantized", *LENGTH, *arguments)
    texts_of = [row["text"] for row in json.loads(out)["answers"]] if as_json else out.splitlines()
    assert status == 2 and texts_of == [expected] and (place / "so_far.txt").read_text() == f"{expected}\n"
    assert f"error: '{'l' * 40} ...': the prompt has 50 tokens" in err and "30 positions: give a shorter one" in err


def test_the_error_names_the_prompt_that_is_too_long(run, model, monkeypatch):
    monkeypatch.setattr(model, "_limits", {"position_ids": 20})
    prompts = ("--prompt", "Hello", "--prompt", "A prompt of more tokens than that", "--prompt", "Why?")
    status, out, err = run("generate", "quantized", *prompts)
    assert (status, out) == (2, "") and "error: 'A prompt of more tokens than that': the prompt has 33 tokens" in err


@pytest.mark.compiled
@pytest.mark.parametrize("rope", [None, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}])
def test_a_model_of_32_positions(run, place, tmp_path, monkeypatch, rope):
    fields = {"max_position_embeddings": 32} | ({} if rope is None else {"rope_parameters": rope})
    name, output = checkpoint("llama", tmp_path / "llama", num_hidden_layers=1, **fields), str(tmp_path / "short")
    assert main(["quantize", "--model", f"hf:{name}", "--recipe", "mxint8", "--output", output]) == 0
    monkeypatch.setattr(LanguageModel, "from_pretrained", FROM_PRETRAINED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(output)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nWhy?\n"))
    for arguments in (("--prompt", "Hello"), ("--chat",)):
        status, out, err = run("generate", output, *arguments, "--json")
        (row,) = json.loads(out)["answers"]
        assert status == 0 and row["tokens"] > 0 and "the model has 32 positions" in err
    status, out, err = run("generate", output, "--prompt", "Hello", "--max-new-tokens", "28")
    expected = FROM_PRETRAINED(output).generate(text="Hello", max_new_tokens=28, do_sample=False)
    assert (status, out) == (0, f"{expected}\n")
    status, out, err = run("generate", output, "--prompt", "Hello", "--max-new-tokens", "29")
    assert (status, out) == (2, "") and "32 positions: give --max-new-tokens 28 or less" in err
    assert ("--text-length 33" in err) == (rope is not None)


def test_output(run, model, place):
    arguments = ("generate", "quantized", *LENGTH, "--prompt", "Hello", "--output")
    assert run(*arguments, "said.txt")[0] == run(*arguments, "said.json")[0] == 0
    assert (place / "said.txt").read_text() == said(model, "Hello") + "\n"
    (row,) = json.loads((place / "said.json").read_text())["answers"]
    assert (row["prompt"], row["text"], row["tokens"]) == ("Hello", said(model, "Hello"), 8)


@pytest.mark.parametrize("more", [(), ("--temperature", "2")])
def test_the_float_model_answers_too(run, model, place, more):
    arguments = ("generate", "quantized", *LENGTH, "--prompt", "Hello", *more)
    alone = run(*arguments)[1]
    status, out, err = run(*arguments, "--float", "llama")
    head, _, quantized = out.partition("\nquantized:\n")
    assert status == 0 and head.startswith("float:\n") and quantized == alone  # with the same random numbers
    (row,) = json.loads(run(*arguments, "--float", "llama", "--json")[1])["answers"]
    assert row["float"] == head.removeprefix("float:\n") and f"the first {row['same_tokens']} of 8 tokens are" in err
    if not more:
        eager = transformers.AutoModelForCausalLM.from_pretrained(place / "llama")
        tokens = model.tokens(["Hello"])
        row_of_tokens = eager.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        assert row["float"] == model.tokenizer.decode(row_of_tokens, skip_special_tokens=True)


def test_the_float_model_in_a_narrower_dtype(run, model, place):
    arguments = ("generate", "quantized", *LENGTH, "--prompt", "Hello", "--float", "llama", "--dtype", "bfloat16")
    (row,) = json.loads(run(*arguments, "--json")[1])["answers"]
    eager = transformers.AutoModelForCausalLM.from_pretrained(place / "llama", dtype="bfloat16")
    tokens = model.tokens(["Hello"])
    row_of_tokens = eager.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert row["float"] == model.tokenizer.decode(row_of_tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prompt", "a", "--system", "b"), "--system is for a chat: give --chat, too"),
        (("--prompt", "a", "--stop", ""), "--stop is empty: give the text that ends an answer"),
        (("--prompt-file", "none.txt"), "no file or folder 'none.txt': give a file with a prompt"),
        (("--prompt-file", "empty.txt"), "'empty.txt' holds no prompt"),
        (("--prompt-file", "binary.txt"), "'binary.txt' is no text"),
        (("--prompt", "a", "--output", "a.pt2"), "cannot write 'a.pt2': its name must end in .txt or .json"),
        (("--audio", "a.wav", "--prompt-file", "a.txt"), "--audio takes no prompt"),
        (("--prompt", "a", "--chat", "--system", "b", "--image", "c.png"), "--system is for text: leave --image out"),
        (("--prompt", "a", "--float", "nowhere"), "'nowhere' is no language model that can be loaded"),
    ],
)
def test_errors(run, place, arguments, text):
    (place / "empty.txt").write_text("\n")
    (place / "binary.txt").write_bytes(b"\xff\xfe")
    status, out, err = run("generate", "quantized", *arguments)
    assert (status, out) == (2, "") and text in err and err.count("\n") == 1, err
