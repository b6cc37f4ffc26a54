"""`pt2mx save-checkpoint`: a quantized language model as a checkpoint of Hugging Face."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.summary import bytes_of
from pt2mx.pt2e.user_errors import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run(options: argparse.Namespace) -> Result:
    from pt2mx.pt2e.checkpoints.save import save_checkpoint  # imports transformers
    from pt2mx.pt2e.language.language_model import LanguageModel

    with Progress(2) as progress:
        quantized = LanguageModel.from_pretrained(options.folder)
        model = _skeleton(options.float)
        progress.begin("save")
        with user_errors(f"write {options.output!r}"):
            save_checkpoint(
                quantized,
                model,
                options.output,
                options.layout,
                unpack=options.unpack,
                max_shard_size=options.max_shard_size,
            )
    size = bytes_of(options.output)
    text = f"{options.output}: {size / 1e6:.1f} MB; {progress.seconds()}"
    return Result(text, {"output": options.output, "bytes": size, "seconds": progress.times()})


def _skeleton(name: str) -> PreTrainedModel:
    """The float model without its weights: the quantized one holds what they became."""
    import torch

    transformers = import_extra("transformers", "hf")
    with user_errors(f"read the configuration of {name!r}"), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        return transformers.AutoModelForCausalLM.from_config(config).eval()
