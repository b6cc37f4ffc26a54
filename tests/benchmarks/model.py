"""Compiled converted models over the compiled float ones in the same dtype: time, and gigabytes of weights.

    python -m tests.benchmarks.model [--device cpu|cuda] [--models minilm bert_large resnet18 llama] [--layers 16]
        [--random-minilm] [--recipes mxint8 mxfp6 mxfp4 mxfp8] [--dtypes float32] [--kinds unpacked] [--json]

With MXFP8 weights and activations: MiniLM (pretrained, or its shape with random weights; 32 sentences of 64 tokens),
four layers of the shape of BERT-large (random weights; 32 x 128 tokens) and ResNet-18 (8 images of 224x224). One step
of decoding with a decoder of the shape of Llama 3.2 1B (random weights, tied embedding, batch 1, static cache) with
MXFP4 weights, its head's too. Models with quantized activations have one row for packed weights and one for
`lower_to_inductor(unpack=True)`; the rows "rotated" have packed weights and rotated matmul inputs. All sides are
compiled alike, as a whole (on a GPU with CUDA graphs), and called in turns; the times are medians. On a GPU ten calls
are queued at a time, as in decoding, where no call waits for the host.

Reach: with packed weights alone at most 0.5x. With quantized activations on a CPU with bfloat16 instructions, MiniLM in
float32 at most 0.45x (0.6x in MXFP8), in bfloat16 0.95x (1.05x); ResNet-18 0.6x and 1.0x. On an H200 MiniLM and
BERT-large in bfloat16 0.9x (1.05x in MXFP8), BERT-large in float32 0.35x.
"""

import argparse
import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2mx
from pt2mx.algorithms import Rotation
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import SentenceEncoder, load_minilm
from pt2mx.pt2e.models.samples import sentences
from tests.benchmarks.decoder import Decoder
from tests.benchmarks.measure import Row, medians_in_turns, report, timed

Program = Callable[..., Tensor]


#: milliseconds a call, seconds of the first call (which compiles), gigabytes of parameters and buffers
_HEADER = (
    "model", "recipe", "weights", "dtype", "float_ms", "mx_ms", "ratio", "float_compile_s", "mx_compile_s", "float_gb",
    "mx_gb",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="instead of the one of each model")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="of MiniLM and ResNet-18")
    parser.add_argument("--random-minilm", action="store_true", help="where the pretrained weights are not installed")
    parser.add_argument("--kinds", nargs="+", choices=("packed", "unpacked", "rotated"), help="default: all")
    parser.add_argument("--layers", type=int, default=16, help="of the decoder")
    parser.add_argument("--repeats", type=int, help="default: 20 on the CPU, 50 on a GPU")
    parser.add_argument("--mode", help="of torch.compile; default on a GPU: reduce-overhead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.dtypes = options.dtypes or {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}[options.device]
    options.repeats = options.repeats or {"cpu": 20, "cuda": 50}[options.device]
    options.mode = options.mode or {"cpu": "default", "cuda": "reduce-overhead"}[options.device]
    rows = []
    for name in options.models:
        load, own, dtypes = MODELS[name]
        for dtype, recipe in itertools.product(dtypes or options.dtypes, options.recipes or [own]):
            try:
                rows += measure(name, load, recipe, getattr(torch, dtype), options)
            except Exception as error:  # the other rows still tell
                print(f"{name} in {dtype}: {type(error).__name__}: {error}", file=sys.stderr)
    report(rows, _HEADER, options.json)


@torch.no_grad()
def measure(name: str, load: Callable, recipe: str, dtype: torch.dtype, options: argparse.Namespace) -> list[Row]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = load(options)
    model, inputs = model.eval().to(options.device, dtype), tuple(to(x, options.device, dtype) for x in inputs)
    program = torch.export.export(model, inputs)
    kinds = ["packed", "rotated"] if recipe.endswith("weight_only") else ["packed", "unpacked", "rotated"]
    kinds = [kind for kind in kinds if kind in (options.kinds or kinds)]
    lowered = [lower(program.module(), kind, inputs, recipe, options.device) for kind in kinds]
    sizes = [gigabytes(m) for m in (model, *lowered)]
    sides = [torch.compile(m, mode=options.mode) for m in (model, *lowered)]
    del program
    compiling = [timed(lambda side=side: queued(side, inputs, 1)) for side in sides]
    count = {"cpu": 1, "cuda": 10}[options.device]
    calls = [lambda side=side: queued(side, inputs, count) for side in sides]
    medians_in_turns(calls, 3)  # records the graphs of a GPU
    times = [1e3 * seconds / count for seconds in medians_in_turns(calls, options.repeats)]
    dtype_name = str(dtype).removeprefix("torch.")
    rows = [
        (name, recipe, kind, dtype_name, times[0], ms, ms / times[0], compiling[0], seconds, sizes[0], size)
        for kind, ms, seconds, size in zip(kinds, times[1:], compiling[1:], sizes[1:], strict=True)
    ]
    return [dict(zip(_HEADER, row, strict=True)) for row in rows]


def lower(exported: GraphModule, kind: str, inputs: tuple[Tensor, ...], recipe: str, device: str) -> GraphModule:
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    if kind == "rotated":
        exported = pt2mx.optimize(exported, quantizer, algorithms=(Rotation(),))
    prepared = pt2mx.prepare_pt2e(exported, quantizer)
    prepared(*inputs)
    return pt2mx.lower_to_inductor(pt2mx.convert_pt2e(prepared), device, unpack=kind == "unpacked")


def queued(program: Program, inputs: tuple[Tensor, ...], count: int) -> None:
    for _ in range(count):
        program(*inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()


def to(x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return x.to(device, dtype if x.is_floating_point() else x.dtype)


def gigabytes(model: nn.Module) -> float:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.data_ptr(): t.nbytes for t in tensors if not t.is_meta}.values()) / 1e9


# ---- models: (options) -> module, inputs ----


def minilm(options: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if options.random_minilm:
        return random_bert(32, 64, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    encoder, tokenize = load_minilm()
    texts = sentences()
    tokens = tokenize([" ".join(texts[i : i + 16]) for i in range(32)])
    return encoder, tuple(t[:, :64].contiguous() for t in tokens)


def bert_large(options: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return random_bert(32, 128, num_hidden_layers=4, **sizes)


def random_bert(batch: int, length: int, **sizes: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    transformers = import_extra("transformers", "hf")
    config = transformers.BertConfig(**sizes)
    encoder = SentenceEncoder(transformers.BertModel(config, add_pooling_layer=False))
    tokens = torch.randint(config.vocab_size, (batch, length))
    return encoder, (tokens, torch.ones_like(tokens))


def resnet18(options: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return import_extra("torchvision", "vision").models.resnet18(weights=None), (torch.randn(8, 3, 224, 224),)


def llama(options: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device(options.device):
        model = Decoder(layers=options.layers)
    return model, (torch.tensor([[1]]), torch.tensor([100]))


#: model -> what loads it, its recipe, its dtype where it has one of its own
MODELS = {
    "minilm": (minilm, "mxfp8", None),
    "bert_large": (bert_large, "mxfp8", None),
    "resnet18": (resnet18, "mxfp8", None),
    "llama": (llama, "mxfp4_weight_only", ("bfloat16",)),
}


if __name__ == "__main__":
    main()
