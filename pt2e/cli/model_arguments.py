"""The arguments of the commands that take models: `quantize`, `compare`, `sensitivity`, `generate`, `perplexity`."""

from __future__ import annotations

from pt2mx.pt2e.cli.argument import (
    DTYPES,
    METHODS,
    METRICS,
    OPERANDS,
    OTHER_FORMATS,
    PRESETS,
    WORST_OPERATORS,
    WORST_ROWS,
    Argument,
    argument,
    device,
    flag,
)
from pt2mx.pt2e.quantizer import shipped

_ALLOW_NAN = flag("--allow-nan", "go on, with a warning, where weights or batches hold NaN or Inf")
_PARTIAL = (
    argument(
        "--part",
        metavar="NAME",
        help="of a checkpoint: the top-level module that the program holds, such as language_model; others may be left "
        "out",
    ),
    flag("--allow-partial", "of a checkpoint: go on where the program leaves any part out"),
)
_EVALUATED_MODEL = (
    argument("model", help="minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME or module.py:factory"),
    argument(
        "--calibration",
        help="folder of .pt/.npz batches, of images (.png, .jpg) or of recordings (.wav); by default the model's "
        "built-in sample",
    ),
    argument(
        "--metric",
        choices=METRICS,
        help="kl of logits, cosine of embeddings, noise over signal; by default kl for torchvision's models and "
        "checkpoints that give logits, cosine for others",
    ),
    device("where the model runs"),
    _ALLOW_NAN,
    *_PARTIAL,
)

#: command -> its arguments
MODEL_ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "quantize": (
        argument(
            "--model",
            required=True,
            help="minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME, module.py:factory or onnx:FILE",
        ),
        argument(
            "--recipe",
            help=f"a YAML file, or one of {', '.join(shipped.names())}; none for a checkpoint that is MX already",
        ),
        argument(
            "--calibration",
            help="folder of .pt/.npz batches, of images (.png, .jpg) or of recordings (.wav), of a language model a "
            "text, or none; by default the model's built-in sample",
        ),
        argument(
            "--optimize",
            choices=(*PRESETS, "none"),
            help="round the weights by a preset of pt2mx.optimize, with the batches of --calibration; by default as "
            "the section algorithms: of the recipe says, none without one",
        ),
        argument(
            "--output",
            default="out.pt2",
            help="the exported program to write (default: out.pt2), or of a language model a folder",
        ),
        device("where the model is quantized, and its program runs"),
        argument(
            "--tensor-parallel",
            type=int,
            default=1,
            metavar="N",
            help="of a language model: divide its layers among N ranks of torchrun (default: 1)",
        ),
        flag("--compile", "also compile the result and compare it with eager"),
        argument("--report", help="file to write the report to; its name ends in .json, .html or .htm"),
        _ALLOW_NAN,
        *_PARTIAL,
        argument(
            "--dtype",
            choices=DTYPES,
            help="of a checkpoint: the dtype to load it in, such as bfloat16 for `save-checkpoint`; by default its own",
        ),
        flag("--full", f"print all operators, not the {WORST_OPERATORS} with the lowest SQNR"),
    ),
    "compare": (
        *_EVALUATED_MODEL,
        argument(
            "--recipes",
            metavar="A,B",
            help=f"names, files and formats; by default all of {', '.join([*shipped.names(), *OTHER_FORMATS])}, "
            "but those of other tasks where the model's is known",
        ),
        argument(
            "--optimize",
            choices=(*PRESETS, "none"),
            help="round the weights of all recipes by a preset of pt2mx.optimize; by default as each recipe says",
        ),
        argument(
            "--output",
            metavar="FILE",
            help="page to write, ending in .html: the plot, and the report of the best recipe",
        ),
        flag("--speed", "compile each result too, and time a batch"),
    ),
    "sensitivity": (
        *_EVALUATED_MODEL,
        argument(
            "--formats", metavar="A,B", default="mxfp4,mxfp6,mxfp8", help="candidates (default: mxfp4,mxfp6,mxfp8)"
        ),
        argument(
            "--method",
            choices=METHODS,
            default="gradient",
            help="forward runs the model for each module and format, gradient estimates by backward passes (default)",
        ),
        argument(
            "--operands",
            choices=OPERANDS,
            help="what is quantized of a module (default: both, and weights with --bits)",
        ),
        flag("--left", "with forward: also all but each module quantized"),
        argument("--bits", type=float, help="suggest formats of the weights, of so many bits a value at most"),
        argument("--activation", metavar="FORMAT", help="with --bits: of all activations (default: in float)"),
        argument("--output", metavar="FILE", help="with --bits: the recipe to write"),
        flag("--full", f"print all rows, not the {WORST_ROWS} costliest"),
    ),
    "generate": (
        argument("folder", help="what `pt2mx quantize --model hf:... --output FOLDER` wrote"),
        argument(
            "--prompt",
            action="append",
            help="give it several times for several answers; by default prompts are asked for, one after the other",
        ),
        flag("--chat", "put prompts into the tokenizer's chat template"),
        argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256"),
        argument(
            "--temperature", type=float, default=0.0, metavar="T", help="sample; 0 (default): the likeliest token"
        ),
        argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens"),
        argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of probability P"),
        argument("--repetition-penalty", type=float, metavar="R", help="above 1: repeat less"),
        argument("--seed", type=int, default=0, help="of sampling; default: 0"),
        argument("--device", help="cpu or cuda; by default as exported"),
        flag("--compile", "compile the model first: worth it for long texts"),
    ),
    "perplexity": (
        argument("folder", help="what `pt2mx quantize` wrote, or a checkpoint of a language model"),
        argument("--text", required=True, help="a text file, or a folder of .txt files"),
        argument("--tokens", type=int, metavar="N", help="use the first N tokens of the text"),
        argument("--float", help="of a quantized folder: the checkpoint to compare it with"),
        argument(
            "--recipe",
            nargs="+",
            action="extend",
            default=[],
            help="of a checkpoint: recipes to quantize it by, a row each",
        ),
        argument("--calibration", help="text for the recipes' algorithms, or none; by default a built-in sample"),
        *_PARTIAL,
    ),
}
