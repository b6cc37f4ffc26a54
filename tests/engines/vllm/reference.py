"""Log-probabilities of transformers with the values of a checkpoint, in float32 and in bfloat16."""

import tempfile
from pathlib import Path

import torch

from tests.engines.vllm.decode import write_decoded
from tests.language_models import transformers

#: a log-probability for each token of each text but the first
Scores = list[list[float]]


def reference(folder: Path, texts: list[list[int]], device: str) -> dict[str, Scores]:
    """Return the log-probabilities by dtype; none where transformers has other parameters than the checkpoint."""
    scores = {}
    with tempfile.TemporaryDirectory() as temporary:
        values = Path(temporary) / "values"
        write_decoded(folder, values)
        for dtype in ("float32", "bfloat16"):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                values, dtype=dtype, output_loading_info=True
            )
            if info["missing_keys"] or info["unexpected_keys"]:
                return {}
            scores[dtype] = [_scores(model.eval().to(device), text) for text in texts]
    return scores


@torch.no_grad()
def _scores(model, text: list[int]) -> list[float]:
    ids = torch.tensor([text], device=model.device)
    logs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def distance(one: Scores, other: Scores) -> float:
    """Return the mean absolute difference of log-probabilities."""
    return (torch.tensor(one) - torch.tensor(other)).abs().mean().item()
