"""Quantization-aware distillation of a decoder: its divergence after training over the best without, and what it costs.

    python -m tests.benchmarks.distillation [--model smollm2-continued|coder] [--formats W4A8 W4A4] [--windows 8192]
        [--text generated] [--batch 8] [--accumulate 1] [--rate 4e-4] [--rounding nearest] [--compile] [--layers 2]
        [--device cuda]
    torchrun --nproc-per-node 2 -m tests.benchmarks.distillation --rounding nearest --device cuda --batch 16
    python -m tests.benchmarks.distillation --costs [--compile] [--device cuda]

`without` is the KL divergence in nats, on the test text of `peers/`, of the best result without training: `balanced`
with `GPTQ(correction=0.25)`. `trained` is that of the same model after `distill` on docstrings of other packages (the
coder: on their functions), or with `--text generated` on what the float model writes from their first tokens.
`difference` is what training changes, window by window, with its 95% interval. Both hold as many bytes. `perplexity` is
that of the float model, of the model without training, and of the trained one. Under torchrun all ranks train together.

`--costs` times a training step: of the quantized student, and of a float student, with the same teacher and optimizer.
The two take turns.
"""

import argparse
import copy
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2mx
from pt2mx.algorithms.options import PRESETS
from pt2mx.fx.graph.tensors import move_to_device
from pt2mx.pt2e.optimize.layers import layered
from pt2mx.pt2e.optimize.losses import kl_divergence
from tests.benchmarks import continued
from tests.benchmarks.accuracy.case import ALGORITHMS, algorithms_of
from tests.benchmarks.measure import Row, medians_in_turns, report, timed
from tests.benchmarks.peers.figures import Scores, difference_text, divergence_cells, mean, mean_text
from tests.benchmarks.peers.methods import DECODERS
from tests.benchmarks.peers.models import MODELS, Model

PACKAGES, GENERATED = "packages", "generated"
BEST, NEAREST = "balanced, corrected", "nearest"
#: windows of packages that the float model goes on from, and from how many of their first tokens: in turn
PROMPTED, PROMPTS = 8192, (16, 4, 16, 8, 32, 12)
#: the steps until the highest rate is reached
WARM_UP = 20


class Subject:
    """A model on a device: exported, with the inputs of `peers/` and text to train on."""

    def __init__(self, name: str, windows: int, text: str, layers: int | None, device: str) -> None:
        self.model: Model = MODELS[name]
        net, tokenizer = self.model.load(layers)
        seen, _, test = self.model.inputs(tokenizer)
        shapes = ({0: torch.export.Dim("batch", max=1024)},)
        exported = torch.export.export(self.model.wrap(net), (seen[:2],), dynamic_shapes=shapes).module()
        self.exported = move_to_device(exported, device).requires_grad_()
        self.seen, self.test = seen.to(device), test.to(device).split(1)
        count = min(windows, PROMPTED) if text == GENERATED else windows
        lessons = shuffled(continued.lessons_of(tokenizer, count, read=self.model.lessons))
        if text == GENERATED:
            lessons = generated(copy.deepcopy(net).to(device, torch.bfloat16), lessons, windows)
        self.lessons = lessons.to(device)

    def optimized(self, name: str, start: str) -> tuple[pt2mx.MXQuantizer, GraphModule]:
        """Return the quantizer of a format, and the model from which training starts."""
        quantizer = self.model.quantizer(name, "even")
        if start == NEAREST:
            return quantizer, self.exported
        batches = [(batch,) for batch in self.seen.split(self.model.at_once)]
        return quantizer, pt2mx.optimize(self.exported, quantizer, batches, algorithms=algorithms_of(start))

    @torch.no_grad()
    def scores(self, model: GraphModule) -> Scores:
        """Return the scores of a model, converted or in float, for each window of the test."""
        outputs, references = (map(call, self.test) for call in (model, self.exported))
        return self.model.metric.scores(outputs, self.test, references)


def shuffled(windows: Tensor) -> Tensor:
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def generated(decoder: nn.Module, lessons: Tensor, windows: int) -> Tensor:
    """Return windows that a decoder writes, each from the first tokens of a lesson."""
    rounds = itertools.islice(enumerate(itertools.cycle(PROMPTS)), math.ceil(windows / len(lessons)))
    written = [
        pt2mx.generate_lessons(decoder, [lessons], prompt=prompt, seed=seed, at_once=4096)[0] for seed, prompt in rounds
    ]
    return shuffled(torch.cat(written))[:windows]


def trained(subject: Subject, options: argparse.Namespace, group: dist.ProcessGroup | None) -> Iterator[Row]:
    """Yield a row for each format."""
    in_float, loss = subject.scores(subject.exported), subject.model.metric.loss
    for name in options.formats:
        start = time.perf_counter()
        quantizer, optimized = subject.optimized(name, options.rounding)
        before = time.perf_counter() - start
        without = subject.scores(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(optimized, quantizer)))
        prepared = pt2mx.prepare_qat_pt2e(optimized, quantizer)
        batches = [(batch,) for batch in subject.lessons.split(options.batch)]
        train = partial(
            *(pt2mx.distill, prepared, subject.exported, batches, "kl_div"),
            lr=options.rate,
            decay="cosine",
            warmup=min(WARM_UP, len(batches) // 4),
            accumulate=options.accumulate,
            compile=options.compile,
            group=group,
            progress=True,
        )
        seconds = timed(train)
        after = subject.scores(pt2mx.convert_pt2e(prepared))
        yield {
            "format": name,
            "without": mean_text(without[loss]),
            "trained": mean_text(after[loss]),
            "ratio": mean(after[loss]) / mean(without[loss]),
            "difference": difference_text(after[loss], without[loss]),
            "perplexity": ", ".join(divergence_cells(scores)["perplexity"] for scores in (in_float, without, after)),
            "seconds without": before,
            "seconds": seconds,
            "tokens/s": subject.lessons.numel() / seconds,
        }


def costs(subject: Subject, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each format: the seconds of a step."""
    for name in options.formats:
        quantizer = subject.model.quantizer(name, "even")
        students = [pt2mx.prepare_qat_pt2e(subject.exported, quantizer), copy.deepcopy(subject.exported)]
        tokens = subject.lessons[: options.batch]
        teacher, *students = (
            layered(model, False, options.compile, None)[0] for model in (subject.exported, *students)
        )
        steps = [_step(student, teacher, tokens) for student in students]
        quantized, plain = medians_in_turns(steps, options.repeats)
        yield {"format": name, "ms": 1e3 * quantized, "float, ms": 1e3 * plain, "ratio": quantized / plain}


def _step(student: nn.Module, teacher: nn.Module, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(student.parameters(), 1e-9)

    def step() -> None:
        with torch.no_grad():
            wanted = teacher(tokens)
        kl_divergence(student(tokens), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DECODERS, default="smollm2")
    parser.add_argument("--formats", nargs="+", default=["W4A8", "W4A4"])
    parser.add_argument("--rounding", choices=(NEAREST, *PRESETS, *ALGORITHMS), default=BEST, metavar="ROUNDING")
    parser.add_argument("--windows", type=int, default=8192, help="of 256 tokens, to train on")
    parser.add_argument("--text", choices=(PACKAGES, GENERATED), default=PACKAGES, help="what to train on")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--layers", type=int, help="keep the first N layers")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 holds the values of these formats
    group = None
    if "RANK" in os.environ:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        group = dist.group.WORLD
    subject = Subject(options.model, options.windows, options.text, options.layers, options.device)
    rows = list(costs(subject, options) if options.costs else trained(subject, options, group))
    if group is None or group.rank() == 0:
        report(rows)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
