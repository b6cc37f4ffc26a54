"""Models on the Hub. A server on this machine takes its place, and huggingface_hub is the real one."""

from unittest.mock import Mock

import pytest
import torch

from pt2mx import LanguageModel, MXError, MXQuantizer
from pt2mx.pt2e.files.card_metadata import Origin, metadata_of
from pt2mx.pt2e.models.hub import is_repository, origin_of
from tests.fake_hub import fake_hub
from tests.language_models import decoder_by_recipe, tokenizer_of_bytes

NAME, RECIPE = "org/tiny-mxfp4", "mxfp4_weight_only"
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch, cache):
    with fake_hub(monkeypatch, cache) as server:
        yield server


@pytest.fixture(scope="module")
def model():
    return decoder_by_recipe(RECIPE, "llama", num_hidden_layers=1)


@pytest.fixture
def pushed(hub, model):
    model.push_to_hub(NAME, recipe=MXQuantizer.from_recipe(RECIPE))
    return hub


def test_a_model_goes_to_the_hub_and_back(hub, model, cache):
    commit = model.push_to_hub(NAME, recipe=MXQuantizer.from_recipe(RECIPE), commit_message="first")
    assert commit.commit_url.startswith(f"{hub.url}/{NAME}/commit/")
    files = hub.repositories[NAME]["main"]
    assert {"README.md", "config.json", "program.pt2", "recipe.yaml"} <= files.keys()
    loaded = LanguageModel.from_pretrained(NAME)
    assert loaded._folder == cache / "models--org--tiny-mxfp4/snapshots" / commit.oid
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    text = files["README.md"].decode()
    assert f"# {NAME}\n" in text and f"hf download {NAME} --local-dir tiny-mxfp4\n" in text


@pytest.mark.compiled
def test_a_loaded_model_is_pushed_with_its_documents(pushed):
    """Its card, which may have been written by hand, and its recipe, also in the program."""
    pushed.add(NAME, "main", {"README.md": b"of the user", "LICENSE.txt": b"terms", "report.json": b"{}"})
    loaded = LanguageModel.from_pretrained(NAME)
    (loaded._folder / "LICENSES").mkdir()
    loaded.push_to_hub("org/again", revision="next")
    repository = pushed.repositories["org/again"]
    files = repository["next"]
    assert not repository["main"] and files["README.md"] == b"of the user"
    assert (files["LICENSE.txt"], files["report.json"]) == (b"terms", b"{}")
    assert files["recipe.yaml"] == MXQuantizer.from_recipe(RECIPE).to_recipe().encode()


def test_revisions_and_tokens(pushed, cache, monkeypatch):
    pushed.add(NAME, "v2", dict(pushed.repositories[NAME]["main"]) | {"README.md": b"second"})
    pushed.token = "hf_secret"
    refused = "there is no folder 'org/tiny-mxfp4', and no repository of the Hub that this token opens: check the name"
    with pytest.raises(MXError, match=f"^{refused}; for a private one log in by `hf auth login`, or give token=$"):
        LanguageModel.from_pretrained(NAME, token="hf_other")
    loaded = LanguageModel.from_pretrained(NAME, revision="v2", token="hf_secret", cache_dir=cache.with_name("other"))
    assert (loaded._folder / "README.md").read_bytes() == b"second"
    assert cache.with_name("other") in loaded._folder.parents
    with pytest.raises(MXError, match=r"^the repository 'org/tiny-mxfp4' of the Hub has no such revision: give one of"):
        LanguageModel.from_pretrained(NAME, revision="v3", token="hf_secret")
    monkeypatch.setattr(loaded, "_save", None)
    with pytest.raises(MXError, match=r"^could not make the repository 'org/more' of the Hub: .*401.*log in by"):
        loaded.push_to_hub("org/more", token="hf_other")
    with pytest.raises(MXError, match=r"^could not make the repository 'a b/c' of the Hub: HFValidationError: Repo id"):
        loaded.push_to_hub("a b/c", token="hf_secret")
    assert "org/more" not in pushed.repositories, "nothing is written before the Hub takes the name"


@pytest.mark.compiled
def test_the_cache_is_read_without_a_connection(pushed, monkeypatch):
    """By the layout of the cache that huggingface_hub wrote."""
    folder = LanguageModel.from_pretrained(NAME)._folder
    pushed.requests.clear()
    assert LanguageModel.from_pretrained(NAME, local_files_only=True)._folder == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert LanguageModel.from_pretrained(NAME)._folder == folder and not pushed.requests
    for options in ({}, {"local_files_only": True}):
        with pytest.raises(
            MXError, match=r"^there is no folder 'org/none', and no such repository in the cache of the Hub"
        ):
            LanguageModel.from_pretrained("org/none", **options)


def test_without_a_connection_the_error_is_not_about_a_login(hub, model, monkeypatch):
    offline = r"^could not make the repository 'org/more' of the Hub: it cannot be reached: check the connection, and"
    monkeypatch.setattr(model, "_save", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MXError, match=offline):
        model.push_to_hub("org/more")
    for name in ("ConnectError", "ReadTimeout"):
        kind = type(name, (Exception,), {})  # as httpx names them, of whichever version
        with pytest.raises(MXError, match=offline), monkeypatch.context() as patch:
            patch.setattr("huggingface_hub.HfApi.create_repo", Mock(side_effect=kind("unknown name")))
            model.push_to_hub("org/more")


def test_only_files_of_quantized_models_are_fetched(hub):
    """A repository of floats is large, and a package has the machine code of another machine."""
    files = {"config.json": b"{}", "model.safetensors": b"many", "pytorch_model.bin": b"many", "prompt.aoti.pt2": b""}
    hub.add("org/float", "main", files)
    with pytest.raises(MXError, match=r"holds no program\.pt2: give the folder that `pt2mx quantize` wrote"):
        LanguageModel.from_pretrained("org/float")
    assert [line for line in hub.requests if "/resolve/" in line and not line.endswith("/config.json")] == []


def test_a_model_of_ranks_is_not_pushed(hub, model, monkeypatch):
    monkeypatch.setattr("pt2mx.pt2e.language.language_model.is_shard", lambda program: True)
    with pytest.raises(MXError, match=r"^each rank has a part of the model: call save_pretrained on each, then"):
        model.push_to_hub(NAME)
    assert not hub.repositories


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    names = ("a/b", "a", "a/b/c", "/a/b", "./b", "../a", "a/", "", tmp_path, None)
    assert is_repository("a/c") and is_repository("org/Llama-3.1_x") and not any(map(is_repository, names))
    with pytest.raises(MXError, match=r"^no folder 'nowhere': give the folder that `pt2mx quantize` wrote$"):
        LanguageModel.from_pretrained("nowhere")


def test_the_origin_of_a_name(hub, tmp_path):
    hub.add(
        "org/base", "main", {"README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"MIT", "model.safetensors": b"many"}
    )
    origin = origin_of("org/base")
    assert origin[:2] == ("org/base", True) and metadata_of(origin.folder) == {"license": "mit"}
    assert sorted(file.name for file in origin.folder.iterdir()) == ["LICENSE", "README.md"]
    assert origin_of(str(origin.folder)) == origin, "a folder of the cache has the name of its repository"
    assert origin_of("org/none") == Origin("org/none", True, None)
    assert origin_of("none") == Origin("none", False, None)
    assert not any(map(origin_of, ("", "/no/where", "no/such/folder")))
    tokenizer_of_bytes().save_pretrained(tmp_path / "local")
    assert origin_of(tmp_path / "local") == Origin("local", False, tmp_path / "local")
    assert origin_of(tmp_path / "local/tokenizer.json") == Origin("tokenizer.json", False, tmp_path / "local")
