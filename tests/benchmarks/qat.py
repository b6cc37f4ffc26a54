"""Accuracy of quantization-aware training on scikit-learn's digits (8x8 images), weights and activations in one format.

    python -m tests.benchmarks.qat [--seeds 5] [--models cnn vit] [--formats mxfp8 int3 ...] [--json]

Three accuracies on the held-out third: the float model, the model cast to the format after training, and the cast model
after further training in the format. The row `float32` trains as long without quantization. Every operator is
quantized, the first and the last layer too.

Reach: training recovers at least 80% of the loss of the cast, if the loss exceeds one point.
"""

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import pt2mx
from pt2mx.extras import import_extra

FLOAT = "float32"
FORMATS = (FLOAT, "mxfp8", "mxint8", "mxfp6", "mxfp4", "int3", "fp3_e2m0", "int2")
BATCH = 128


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) float32 of mean 0 and variance 1, labels (n,) int64."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class Schedule(NamedTuple):
    """So many epochs of AdamW; the learning rate rises for a tenth of them, then falls to zero along a cosine."""

    epochs: int
    lr: float


#: model -> schedules of the float training and of the training in the format
SCHEDULES = {"cnn": (Schedule(30, 3e-3), Schedule(20, 2e-3)), "vit": (Schedule(40, 2e-3), Schedule(40, 1e-3))}


class Accuracies(NamedTuple):
    """Shares of the test images, in percent."""

    float: float
    cast: float
    trained: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--json", action="store_true", help="print all accuracies instead of the table")
    options = parser.parse_args()
    start = time.perf_counter()
    results = {}
    for name in options.models:
        for seed in tqdm(range(options.seeds), desc=name, disable=None, file=sys.stderr):
            for spelling, accuracies in run(name, seed, options.formats).items():
                results.setdefault((name, spelling), []).append(accuracies)
    if options.json:
        print(json.dumps([{"model": m, "format": f, "accuracies": a} for (m, f), a in results.items()]))
        return
    print(table(results))
    cost = f"{options.seeds} seeds, {(time.perf_counter() - start) / 60:.0f} min"
    print(f"{cost}; torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")


def run(name: str, seed: int, formats: tuple[str, ...] = FORMATS) -> dict[str, Accuracies]:
    """Train the model with one seed, which also splits the images, and measure each format."""
    digits = load(seed)
    torch.manual_seed(seed)
    model = MODELS[name]()
    before, after = SCHEDULES[name]
    train(model, digits, before)
    reached = accuracy(model.eval(), digits)
    results = {}
    for spelling in formats:
        config = None if spelling == FLOAT else pt2mx.get_default_mx_quantization_config(spelling, spelling)
        quantizer = pt2mx.MXQuantizer().set_global(config)
        cast = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported(model.eval()), quantizer))
        prepared = pt2mx.prepare_qat_pt2e(exported(copy.deepcopy(model).train()), quantizer)
        torch.manual_seed(seed)
        train(prepared, digits, after)
        trained = pt2mx.convert_pt2e(prepared)
        results[spelling] = Accuracies(reached, accuracy(cast, digits), accuracy(trained, digits))
    return results


def load(seed: int) -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor((images - images.mean()) / images.std(), dtype=torch.float32).view(-1, 1, 8, 8)
    ours, held_out = train_test_split(range(len(labels)), test_size=1 / 3, stratify=labels, random_state=seed)
    labels = torch.tensor(labels)
    return Digits((images[ours], labels[ours]), (images[held_out], labels[held_out]))


def exported(model: nn.Module) -> torch.fx.GraphModule:
    shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(model, (torch.randn(2, 1, 8, 8),), dynamic_shapes=shapes).module()


def train(model: nn.Module, digits: Digits, schedule: Schedule, slices: Sequence[nn.Module] = ()) -> None:
    """Train a model, together with slices that share its parameters: the loss is the sum."""
    images, labels = digits.train
    steps = schedule.epochs * (len(labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.lr, steps, pct_start=0.1)
    for _ in range(schedule.epochs):
        order = torch.randperm(len(labels))
        for batch in order.split(BATCH)[: len(labels) // BATCH]:  # the rest has its turn in another epoch
            optimizer.zero_grad()
            for one in (model, *slices):
                nn.functional.cross_entropy(one(images[batch]), labels[batch]).backward()
            optimizer.step()
            rate.step()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    images, labels = digits.test
    return 100 * (model(images).argmax(1) == labels).double().mean().item()


def cnn() -> nn.Module:
    """Convolutions with batch norm and ReLU, dropout, a linear layer."""

    def block(channels: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels, outputs, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*block(1, 16, 1), *block(16, 32, 2), *block(32, 32, 2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10))


class ViT(nn.Module):
    """transformers' vision transformer, small: 16 patches of 2x2, 2 layers of width 64; logits (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_extra("transformers", "hf")
        config = transformers.ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.1,
            num_labels=10,
        )
        self.classifier = transformers.ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(pixel_values=images).logits


MODELS = {"cnn": cnn, "vit": ViT}


def table(results: dict[tuple[str, str], list[Accuracies]]) -> str:
    """A table of Markdown: percent, mean over the seeds ± standard deviation."""
    lines = ["| model | format | float | cast | trained | lost | recovered |", "|---|---|---|---|---|---|---|"]
    for (name, spelling), accuracies in results.items():
        values = torch.tensor(accuracies, dtype=torch.float64)  # (seeds, 3)
        mean, spread = values.mean(0), values.std(0) if len(values) > 1 else torch.zeros(3)
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean, spread, strict=True)]
        lost = mean[0] - mean[1]
        share = f"{100 * recovered(accuracies):.0f}%" if lost > 1 else "-"
        lines.append(f"| {' | '.join([name, spelling, *cells, f'{lost:.1f}', share])} |")
    return "\n".join(lines)


def recovered(accuracies: list[Accuracies]) -> float:
    """Return the share of the loss of the cast that training recovered, over all seeds."""
    reached, cast, trained = map(sum, zip(*accuracies, strict=True))
    return (trained - cast) / (reached - cast)


if __name__ == "__main__":
    main()
