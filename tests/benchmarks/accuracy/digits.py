"""scikit-learn's digits (8x8 images): a small CNN and an MLP, trained here in seconds, every operator quantized.

Calibrated on the 1,198 images of training; accuracy in percent and mean cosine of the logits on the 599 others.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from tests.benchmarks import qat
from tests.benchmarks.accuracy.case import Case, Figures, Forward, everything

EPOCHS, RATE = 30, 3e-3


def mlp() -> nn.Module:
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": qat.cnn, "mlp": mlp}


def case(name: str) -> Case:
    digits = qat.load(0)
    torch.manual_seed(0)
    model = MODELS[name]()
    qat.train(model, digits, qat.Schedule(EPOCHS, RATE))
    exported = qat.exported(model.eval())
    images, labels = digits.test
    with torch.no_grad():
        wanted = exported(images)

    def judge(forward: Forward) -> Figures:
        logits = forward(images)
        cosine = float(cosine_similarity(logits, wanted).mean())
        right = float((logits.argmax(1) == labels).double().mean())
        return Figures(1 - cosine, {"accuracy": f"{100 * right:.1f}%", "cosine": f"{cosine:.4f}"})

    return Case(exported, [(batch,) for batch in digits.train[0].split(128)], everything, judge)
