import contextlib
import functools
import io
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist

from pt2mx import LanguageModel, MXError
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.folder import is_quantized
from tests.language_models import divisible_decoder, padded, tokenizer_of_bytes
from tests.rank_processes import run_ranks

#: (family, also compiled and written by two ranks); the latter take longer
MORE = (("llama", True), ("qwen3", False), ("gemma3", False), ("mistral", False))
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}


def quantize(checkpoint, output, *options):
    output = [] if "--output" in options else ["--output", str(output)]
    return main(["quantize", "--model", f"hf:{checkpoint}", "--recipe", "mxfp4_weight_only", *output, *options])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For a family: a checkpoint, and its quantized folders for one rank and for two."""

    @functools.cache
    def made(family):
        place = tmp_path_factory.mktemp(family)
        tokens = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
        divisible_decoder(family, num_hidden_layers=1, **tokens).save_pretrained(place / "checkpoint")
        tokenizer_of_bytes().save_pretrained(place / "checkpoint")
        for name, options in (("whole", ["--calibration", "none"]), ("ranks", ["--tensor-parallel", "2"])):
            assert quantize(place / "checkpoint", place / name, *options) == 0
        return place

    return made


def computed(folder, compiled=False):
    """Return the outputs of a model by name."""
    ids, mask = padded()
    loaded, result = LanguageModel.from_pretrained(folder), {}
    if compiled:
        loaded.compile()
    prompt = loaded(ids, mask)
    token = loaded(ids[:, :1], torch.cat([mask, mask[:, -1:]], 1), past_key_values=prompt.past_key_values)
    result["prompt"], result["token"] = prompt.logits, token.logits
    for name, options in {"greedy": GREEDY, "sampled": SAMPLED}.items() if not compiled else ():
        torch.manual_seed(1)
        result[name] = loaded.generate(ids, attention_mask=mask, max_new_tokens=12, **options)
    return result


def spoken(arguments, lines=""):
    """Return what `pt2mx generate` prints for lines on stdin."""
    sys.stdin = io.StringIO(lines)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["generate", *arguments, "--max-new-tokens", "8"]) == 0
    return out.getvalue()


def run(rank, folders, results, port, thorough):
    torch.set_num_threads(1)
    LanguageModel.from_pretrained = functools.cache(LanguageModel.from_pretrained)  # the command changes no model
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")  # as torchrun does
    result = {"exported by one": computed(f"{folders}/ranks")}
    if thorough:
        result["compiled"] = computed(f"{folders}/ranks", compiled=True)
        assert quantize(f"{folders}/checkpoint", f"{results}/written", "--tensor-parallel", "2") == 0
        result["exported by two"] = computed(f"{results}/written")
    result["said"] = spoken([f"{folders}/ranks", "--prompt", "Hello"])
    result["asked"] = spoken([f"{folders}/ranks"], "" if rank else "Hello\nHello\n")  # a terminal is the first rank's
    torch.save(result, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("family", "thorough"), [("llama", False), *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)]
)
def test_two_ranks_give_what_one_gives(folders, family, thorough, tmp_path):
    place = folders(family)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(run, str(place), str(tmp_path), port, thorough)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    text, expected = spoken([f"{place}/whole", "--prompt", "Hello"]), computed(place / "whole")
    assert (first.pop("said"), first.pop("asked")) == (text, 2 * text)
    assert (second.pop("said"), second.pop("asked")) == ("", "")
    for name, kinds in first.items():
        for kind, result in kinds.items():
            assert torch.equal(result, second[name][kind])
            assert torch.allclose(result, expected[kind], atol=1e-5), (name, kind)


@pytest.mark.compiled
def test_files_of_a_folder(folders, tmp_path):
    place, programs = folders("llama"), ["program.rank0of2.pt2", "program.rank1of2.pt2"]
    files = {file.name for file in (place / "ranks").iterdir()}
    assert files == {*programs, *(file.name for file in (place / "whole").iterdir())} - {"program.pt2"}
    assert is_quantized(place / "ranks") and not is_quantized(place / "checkpoint")
    size = sum((place / "ranks" / name).stat().st_size for name in programs)
    assert f"| files with weights, bytes |  | {size:,} |" in (place / "ranks/README.md").read_text()
    for name, expected in (("ranks", programs), ("whole", ["program.pt2"]), ("ranks", programs)):
        for rank in ranks.rank_contexts(len(expected)):
            with rank:
                LanguageModel.from_pretrained(place / name).save_pretrained(tmp_path)
        assert ranks.programs_in(tmp_path) == expected


@pytest.mark.compiled
def test_another_number_of_processes(folders, monkeypatch):
    with pytest.raises(MXError, match=r"ranks is 2 and the number of processes 1: start `torchrun --nproc-per-node 2"):
        LanguageModel.from_pretrained(folders("llama") / "ranks")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(MXError, match="ranks is 2 and the number of processes 3"):
        LanguageModel.from_pretrained(folders("llama") / "ranks")
    with pytest.raises(MXError, match=r"ranks is 1 and the number of processes 3.* no torchrun"):
        ranks.rank_contexts(1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tensor-parallel", "2", "--optimize", "balanced"], "values of all ranks: run `torchrun --nproc-per-node 2"),
        (["--tensor-parallel", "2", "--calibration", "text.txt"], "values of all ranks"),
        (["--tensor-parallel", "0"], "--tensor-parallel 0 must be at least 1"),
        (["--tensor-parallel", "2", "--output", "llama.pt2"], "--tensor-parallel is for a language model"),
        (["--tensor-parallel", "4"], "num_key_value_heads=2 cannot be divided among 4 ranks"),
    ],
)
def test_errors_of_the_command(folders, options, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").touch()
    assert quantize(folders("llama") / "checkpoint", tmp_path / "out", *options) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
