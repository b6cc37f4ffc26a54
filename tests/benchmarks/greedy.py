"""Whether generated text is the text of the definition: equal greedy tokens, and the distance of the logits.

    python -m tests.benchmarks.greedy FOLDER [--device cuda] [--tokens 1024] [--batch 8] [--runs 10]

The model in FOLDER generates greedy tokens from the first words of docstrings, on a GPU compiled, as
`LanguageModel.generate` runs them. Then the decompositions of its operators, in eager mode, read the same text at once.
`equal`: the share of generated tokens that have the largest logit there. `distance`: the norm of the difference of the
logits of one token, over the norm of the logits, the median of all tokens. `runs`: how many runs returned the same
tokens as the first.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx import LanguageModel
from pt2mx.fx.graph.tensors import move_to_device
from tests.benchmarks.accuracy.texts import sentences
from tests.benchmarks.measure import hardware

_PROMPT = 16  # tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1024, help="to generate, of all sequences; default: 1024")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args(arguments)
    model = LanguageModel.from_pretrained(options.folder, options.device)
    prompt = prompts(model, options.batch)
    if options.device == "cuda":
        model.compile(mode="reduce-overhead")
    length = -(-options.tokens // options.batch)
    settings = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "output_logits": True}
    runs = [model.generate(prompt, **settings, return_dict_in_generate=True) for _ in range(options.runs)]
    repeated = sum(torch.equal(run.sequences, runs[0].sequences) for run in runs)
    logits = torch.stack(runs[0].logits, 1).float()  # (batch, length, vocabulary)
    expected = definition(options.folder, options.device, runs[0].sequences)[:, _PROMPT - 1 : -1].float()
    equal = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    distance = ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    print(f"{logits[..., 0].numel()} tokens: equal {equal:.2%}, distance {distance:.2e}, {repeated} equal runs")
    print(hardware())


def prompts(model: LanguageModel, batch: int) -> Tensor:
    """Return (batch, _PROMPT) tokens of different sentences."""
    texts = [text for text in sentences() if len(text) > 8 * _PROMPT][:batch]
    return model.tokens(texts)["input_ids"][:, -_PROMPT:]


@torch.no_grad()
def definition(folder: str, device: str, tokens: Tensor) -> Tensor:
    """Return the logits (batch, length, vocabulary) of the program before lowering, in eager mode."""
    model = LanguageModel.from_pretrained(folder, device)
    model.__dict__["decoder"] = move_to_device(model.program.module(check_guards=False), model.device)
    return model(tokens).logits


if __name__ == "__main__":
    main()
