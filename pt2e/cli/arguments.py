"""The arguments of all commands as data: a command line is checked before torch is imported, which takes seconds.

This module imports no torch. It therefore repeats choices that the Python API defines; a test compares them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

PRESETS = ("fast", "imatrix", "balanced", "best")
DECAYS = ("linear", "cosine", "constant")
METRICS = ("kl", "cosine", "noise")
METHODS = ("forward", "gradient", "both")
OPERANDS = ("both", "weights", "activations")
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("compressed-tensors", "mxfp4", "quark", "fp8", "modelopt")
DIALECTS = ("pt2mx", "native", "quark", "standard", "openvino", "tensorrt")
OPSETS = (18, 25)
BACKENDS = ("portable", "xnnpack")
RUNTIMES = ("onnxruntime", "openvino")
DESTINATIONS = ("vllm", "transformers", "gguf", "onnx", "openvino", "executorch", "cpu", "cuda")
#: formats that `compare` tries without a recipe
OTHER_FORMATS = ("mxfp8_e5m2", "mxfp6_e3m2")
#: formats that `sensitivity` tries
FORMATS = ("mxfp4", "mxfp6", "mxfp8")

#: operators in the summary of `quantize`, and rows of `sensitivity`, without `--full`
WORST_OPERATORS, WORST_ROWS = 10, 20
#: tokens that `generate` generates at most
NEW_TOKENS = 256
#: the metavar of an option that takes names, separated by commas, by blanks or by both
NAMES = "A,B"
#: the endings of recipe files
YAML = (".yaml", ".yml")
#: what separates names, but not within a format such as mxfp4(even,even)
_COMMA, _LINE_END, _BLANK = (re.compile(rf"{separator}(?![^(]*\))") for separator in (",", r"\n+", " "))
#: the folder that `demo` writes
DEMO_FOLDER = "pt2mx-demo"


#: the names and the options of a call of `argparse.ArgumentParser.add_argument`
Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument, described as for `add_argument`."""
    return names, options


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return argument(name, action="store_true", help=text)


def several(name: str, text: str, **options: Any) -> Argument:
    """Return an option with one value or more, which may be given several times."""
    return argument(name, nargs="+", action="extend", default=[], help=text, **options)


def repeated(name: str, text: str, **options: Any) -> Argument:
    """Return an option with one value, which may be given several times."""
    return argument(name, action="append", help=text, **options)


def device(meaning: str) -> Argument:
    """Return the option `--device`."""
    return argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"{meaning} (default: cpu)")


def split_names(words: Iterable[str]) -> list[str]:
    """Return the names in the words that an option is given, "" where one is missing. A path may hold blanks."""
    names: list[str] = []
    for part in _COMMA.split("\n".join(words)):
        for text in _LINE_END.split(part.strip()):
            names += [text] if _is_path(text) else _BLANK.split(" ".join(text.split()))
    return names


def _is_path(text: str) -> bool:
    """Return whether a text is the path of a file, or of one that is missing, and no list of files."""
    is_meant = "/" in text or text.endswith(YAML)
    return os.path.isfile(text) or (is_meant and not any(map(os.path.isfile, text.split())))


#: arguments of every command
COMMON = (
    flag("--json", "print the result as one JSON object"),
    flag("--traceback", "print the whole traceback of an error"),
)

#: how images of --calibration become inputs
_IMAGES = (
    argument(
        "--image-size",
        metavar="N",
        help="for a folder of images: resize and crop them to NxN, or to HxW (default: the size of the example)",
    ),
    several("--mean", "for images: the mean of values in [0, 1] of each channel, or one (default: 0)", metavar=NAMES),
    several("--std", "for images: their standard deviation, likewise (default: 1)", metavar=NAMES),
)
_ALLOW_NAN = flag("--allow-nan", "warn of NaN or Inf in weights or batches and go on; by default they are an error")
_DTYPE = argument("--dtype", choices=DTYPES, help="for a checkpoint: the dtype to load it in (default: its own)")
_IMPORT = repeated(
    "--import",
    "run this file first: it defines custom operators, or formats; several times for several",
    metavar="FILE.py",
    dest="imports",
)
#: how `--distill` trains; the defaults are those of `pt2mx.distill`
_TRAINING = (
    argument(
        "--distill-generated",
        action="store_true",
        default=None,
        help="with --distill: train on what the float model writes from the first 16 tokens of each block of the text",
    ),
    argument("--distill-epochs", type=int, metavar="N", help="with --distill: passes over the text (default: 1)"),
    argument("--distill-lr", type=float, metavar="RATE", help="with --distill: the highest rate (default: 2e-4)"),
    argument("--distill-decay", choices=DECAYS, help="with --distill: how the rate goes down (default: linear)"),
    argument("--distill-warmup", type=int, metavar="N", help="with --distill: steps of a rising rate (default: 0)"),
    argument(
        "--distill-accumulate",
        type=int,
        metavar="N",
        help="with --distill: blocks of 512 tokens in a step, on each rank of torchrun (default: 1)",
    ),
    argument(
        "--distill-recompute",
        action="store_true",
        default=None,
        help="with --distill: compute the activations of layers again for the gradient, which takes less memory",
    ),
    argument(
        "--distill-compile",
        action="store_true",
        default=None,
        help="with --distill: compile the models, which takes minutes and makes steps faster",
    ),
    argument(
        "--distill-checkpoint",
        metavar="FOLDER",
        help="with --distill: keep the state of the training here, and go on from it",
    ),
)
_CHECKPOINT = (
    argument("--part", metavar="NAME", help="for a checkpoint: the module to keep whole; others may be left out"),
    flag(
        "--allow-partial",
        "for a checkpoint: leave out any part, and take codes without a scale for values",
    ),
    _DTYPE,
)
_EVALUATED_MODEL = (
    argument("model", help="minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME, hf:FILE.gguf or module.py:factory"),
    argument(
        "--calibration",
        help="a folder of .pt/.npz batches, of images (.png, .jpg) or of recordings (.wav) (default: the model's "
        "built-in sample)",
    ),
    *_IMAGES,
    _IMPORT,
    argument(
        "--metric",
        choices=METRICS,
        help="kl: divergence of logits; cosine: of embeddings; noise: noise-to-signal power (default: kl for "
        "torchvision's models and checkpoints that output logits, cosine for others)",
    ),
    device("where the model runs"),
    _ALLOW_NAN,
    *_CHECKPOINT,
)
_FOLDER = argument("folder", help="the folder that `pt2mx quantize --model hf:... --output FOLDER` wrote")
_EXPORT_DEVICE = argument("--device", help="cpu or cuda (default: the device of the export)")
_REPORT = argument("--report", help="the report to write; its name ends in .json, .html or .htm")
_FULL = flag("--full", f"print all operators, not only the {WORST_OPERATORS} with the lowest SQNR")
_QUANTIZED_HEAD = flag(
    "--quantized-head", "quantize the head in a layout, too, of which no engine is known to load one (quark)"
)
_PROGRAM = argument("program", help="a file that `pt2mx quantize` or torch.export.save wrote")

#: command -> its arguments
ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "quantize": (
        argument(
            "--model",
            required=True,
            help="minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME, hf:FILE.gguf, module.py:factory or onnx:FILE",
        ),
        argument(
            "--recipe",
            help="a YAML file, a format such as fp6_e3m2, or a name that `pt2mx recipes` lists; leave it out for a "
            "checkpoint that is already in MX formats, or with --for, which then chooses",
        ),
        several(
            "--for",
            f"where the model is to run: takes the recipe in a form for {', '.join(DESTINATIONS)} or several of them",
            metavar=NAMES,
            dest="destinations",
        ),
        argument(
            "--calibration",
            help="a folder of .pt/.npz batches, of images (.png, .jpg) or of recordings (.wav); for a language model a "
            "text; or none (default: the model's built-in sample)",
        ),
        *_IMAGES,
        _IMPORT,
        argument(
            "--optimize",
            choices=(*PRESETS, "none"),
            help="round the weights with a preset of pt2mx.optimize, on the batches of --calibration (default: the "
            "section `algorithms` of the recipe, or none)",
        ),
        argument(
            "--anchor",
            metavar="FORMAT",
            help="store the weights in this 8-bit format, such as mxint8, from which `pt2mx slice` makes those of "
            "--recipe; with --optimize",
        ),
        argument(
            "--distill",
            metavar="TEXT",
            help="train the quantized weights of a language model on this text, to predict like in float",
        ),
        *_TRAINING,
        argument("--output", default="out.pt2", help="a program, or for a language model a folder (default: out.pt2)"),
        device("where the model is quantized and its program runs"),
        argument(
            "--tensor-parallel",
            type=int,
            default=1,
            metavar="N",
            help="for a language model: divide its layers among N ranks of torchrun (default: 1)",
        ),
        argument(
            "--text-length",
            type=int,
            metavar="TOKENS",
            help="for a language model with RoPE of the types longrope and dynamic: use its frequencies for texts of "
            "up to this length (default: those for short texts)",
        ),
        flag("--compile", "also compile the result and compare it with eager mode"),
        _REPORT,
        _ALLOW_NAN,
        *_CHECKPOINT,
        _FULL,
    ),
    "slice": (
        argument("program", help="a program that `pt2mx quantize` wrote, or the folder of a language model"),
        _IMPORT,
        argument("--recipe", required=True, help="a YAML file or the name of a shipped recipe, with narrower weights"),
        argument("--output", required=True, help="the program to write, or for a language model a folder"),
        _REPORT,
        _FULL,
    ),
    "compare": (
        *_EVALUATED_MODEL,
        several(
            "--recipes",
            "names of recipes, files and formats (default: all that `pt2mx recipes` lists, and "
            f"{', '.join(OTHER_FORMATS)}; without recipes for another task if the model's task is known)",
            metavar=NAMES,
        ),
        argument(
            "--optimize",
            choices=(*PRESETS, "none"),
            help="round the weights for all recipes with a preset of pt2mx.optimize (default: as each recipe says)",
        ),
        argument(
            "--output", metavar="FILE", help="an .html page to write: the plot, the report of the recommended recipe"
        ),
        flag("--speed", "also compile each result, and time a batch in turns with the model in float32 and bfloat16"),
    ),
    "sensitivity": (
        *_EVALUATED_MODEL,
        several("--formats", f"to try (default: {','.join(FORMATS)})", metavar=NAMES),
        argument(
            "--method",
            choices=METHODS,
            default="gradient",
            help="forward: run the model once per module and format; gradient: estimate from backward passes (default)",
        ),
        argument("--operands", choices=OPERANDS, help="operands to quantize (default: both; with --bits: weights)"),
        flag("--left", "with forward: also quantize all modules but one"),
        argument("--bits", type=float, help="suggest formats of the weights with at most this many bits per value"),
        argument("--activation", metavar="FORMAT", help="with --bits: the format of all activations (default: float)"),
        argument("--output", metavar="FILE", help="with --bits: the recipe to write; its name ends in .yaml"),
        flag("--full", f"print all rows, not only the {WORST_ROWS} most sensitive"),
    ),
    "generate": (
        _FOLDER,
        _IMPORT,
        repeated("--prompt", "the prompt; give it several times for several answers (default: ask for prompts)"),
        repeated("--prompt-file", "a file that holds a prompt; several times for several answers", metavar="FILE"),
        repeated("--image", "an image for each prompt (vision models); several times for several", metavar="FILE"),
        repeated("--audio", "transcribe this .wav file (Whisper etc.); several times for several", metavar="FILE"),
        flag("--chat", "use the tokenizer's chat template; prompts from stdin are turns of one conversation"),
        argument("--system", metavar="TEXT", help="with --chat: the system message before the conversation"),
        repeated("--stop", "end an answer before this text; give it several times for several texts", metavar="TEXT"),
        argument("--float", metavar="CHECKPOINT", help="also print the answers of this float checkpoint"),
        _DTYPE,
        argument("--output", metavar="FILE", help="write the answers to this file; its name ends in .txt or .json"),
        argument(
            "--max-new-tokens",
            type=int,
            metavar="N",
            help=f"most tokens to generate (default: {NEW_TOKENS}, or what the model's positions leave)",
        ),
        argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling (default: 0, no sampling)"),
        argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens"),
        argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens of total probability P"),
        argument("--repetition-penalty", type=float, metavar="R", help="above 1: repeat less"),
        argument("--seed", type=int, default=0, help="the seed of sampling (default: 0)"),
        _EXPORT_DEVICE,
        flag("--compile", "compile the model first: worth it for long texts"),
    ),
    "eval": (
        _FOLDER,
        _IMPORT,
        several("--tasks", "names of tasks; * and ? match several", metavar=NAMES, required=True),
        argument("--limit", type=int, metavar="N", help="use the first N documents of each task"),
        argument("--include-path", metavar="DIR", help="a folder with YAML files that describe your own tasks"),
        argument("--fewshot", type=int, metavar="N", help="examples in each prompt (default: those of the task)"),
        flag("--chat", "put prompts into the tokenizer's chat template, each example as a turn"),
        argument("--batch-size", type=int, default=1, metavar="N", help="texts to read at once (default: 1)"),
        argument("--max-length", type=int, metavar="N", help="tokens to read at most: the last ones of a prompt"),
        argument("--output", metavar="FILE", help="the results as JSON; its name ends in .json"),
        _EXPORT_DEVICE,
    ),
    "perplexity": (
        argument("folder", help="a folder that `pt2mx quantize` wrote, or the checkpoint of a language model"),
        _IMPORT,
        argument("--text", required=True, help="a text file, or a folder of .txt files"),
        argument("--tokens", type=int, metavar="N", help="use the first N tokens of the text"),
        argument("--float", help="for a quantized folder: the checkpoint to compare it with"),
        several("--recipe", "for a checkpoint: recipes to quantize it with, one row each", metavar=NAMES),
        argument("--calibration", help="a text for the recipes' algorithms, or none (default: the built-in sample)"),
        *_CHECKPOINT,
    ),
    "compile": (
        argument(
            "program",
            help="a file that `pt2mx quantize` or torch.export.save wrote, or the folder of a language model, which "
            "then gets packages",
        ),
        _IMPORT,
        argument("--output", help="the package to write; its name ends in .pt2"),
        device("where the package runs"),
        flag("--portable", "make a package that runs where pt2mx is not installed"),
        flag("--unpack", "keep weights dequantized: larger, mostly faster"),
        argument(
            "--no-benchmark",
            dest="benchmark",
            action="store_false",
            help="do not compile the program in float32 and in bfloat16, too, to time the package beside them",
        ),
    ),
    "run": (
        argument("package", help="a package that `pt2mx compile` wrote, or an ONNX file"),
        _IMPORT,
        argument("--inputs", help="a .pt or .npz batch (default: the inputs of the export)"),
        argument("--output", help="write the outputs with torch.save to this file; its name ends in .pt"),
        argument(
            "--runtime",
            choices=RUNTIMES,
            help="what runs an ONNX file (default: the first of them that is installed and takes the file)",
        ),
        flag("--benchmark", "time it in rounds, with their interval; with --float beside a program in float"),
        argument(
            "--float",
            metavar="PROGRAM",
            help="with --benchmark: the program that was compiled, or one in float; compiled in float32 and bfloat16",
        ),
    ),
    "inspect": (argument("file", help="a program, a package, an ONNX file or a language model's folder"), _IMPORT),
    "export-onnx": (
        argument("program", help="a program, or the folder of a quantized language model"),
        _IMPORT,
        argument("--output", required=True, help="the file to write; its name ends in .onnx"),
        argument("--opset", type=int, help=f"{OPSETS[0]} to {OPSETS[1]} (default: the opset of torch's exporter)"),
        argument("--target", choices=DIALECTS, default="pt2mx", help="the nodes to write (default: pt2mx)"),
    ),
    "export-executorch": (
        _PROGRAM,
        _IMPORT,
        argument("--output", required=True, help="the file to write; its name ends in .pte"),
        argument(
            "--backend",
            choices=BACKENDS,
            default="portable",
            help="what runs the graph: portable kernels, or XNNPACK where it can (default: portable)",
        ),
        argument("--max-size", type=int, help="the largest size of dynamic dimensions without an upper bound"),
    ),
    "save-checkpoint": (
        _FOLDER,
        _IMPORT,
        argument("--float", required=True, metavar="CHECKPOINT", help="the float checkpoint that was quantized"),
        argument("--output", required=True, help="the folder to write, new or empty; a file for --layout gguf"),
        argument(
            "--layout",
            choices=(*LAYOUTS, "gguf"),
            help="the layout of the checkpoint (default: the first that has the formats); gguf writes a file",
        ),
        several(
            "--unpack",
            "modules whose weights are written as values, not codes, such as '.*embed_tokens'",
            metavar="REGEX",
        ),
        _QUANTIZED_HEAD,
        argument("--max-shard-size", default="5GB", help="the size of a file of tensors (default: 5GB)"),
    ),
    "convert-checkpoint": (
        argument("source", help="the folder of the checkpoint: config.json and safetensors; or a GGUF file"),
        argument("output", help="the folder to write, a file for --layout gguf; an interrupted run continues"),
        argument(
            "--recipe",
            help="a shipped recipe, or the path of one (default: mxfp4_weight_only; a quantized checkpoint takes none)",
        ),
        argument(
            "--layout",
            default="compressed-tensors",
            choices=(*LAYOUTS, "gguf"),
            help="the layout of codes and scales (default: compressed-tensors)",
        ),
        argument("--weights", help="the format for a quantized checkpoint's codes, such as nvfp4 (default: their own)"),
        argument("--dtype", choices=DTYPES, help="the dtype of tensors that stay in float (default: their own)"),
        _QUANTIZED_HEAD,
        argument("--statistics", help="a file of save_statistics: GPTQ rounds with its statistics of inputs"),
        argument("--jobs", type=int, default=1, help="the number of shards to convert at a time (default: 1)"),
    ),
    "card": (
        argument("folder", help="a folder that `pt2mx quantize` or `pt2mx save-checkpoint` wrote"),
        argument("--name", help="the repository it goes to, such as my-name/smollm2 (default: the folder's name)"),
        argument("--base-model", metavar="NAME", help="the float model's name on the Hub (default: as the card says)"),
        argument("--license", metavar="NAME", help="its license, such as apache-2.0 (default: as the card says)"),
        argument("--report", metavar="FILE", help="a report in JSON (default: report.json in the folder)"),
        several(
            "--measured",
            "files with figures to add: what `pt2mx perplexity --json` printed, or `pt2mx eval --output` wrote",
            metavar="FILE",
        ),
        argument("--output", metavar="FILE", help="the file to write, such as FOLDER/README.md (default: print)"),
    ),
    "conformance": (
        several("--implementation", "the implementations to check (default: all that are installed)", metavar=NAMES),
        several("--format", "the formats to check, such as mxfp4 (default: all six)", metavar=NAMES),
        argument("--output", metavar="FILE", help="write the tables (.md) or all rows (.json)"),
    ),
    "demo": (argument("--output", default=DEMO_FOLDER, help=f"the folder for all results (default: {DEMO_FOLDER})"),),
    "completion": (argument("shell", choices=("bash", "zsh", "fish"), help="the shell that completes"),),
}

#: command with actions -> action -> (the help text, its arguments); without an action the first one runs
ACTIONS: dict[str, dict[str, tuple[str, tuple[Argument, ...]]]] = {
    "recipes": {
        "list": ("list the shipped recipes", ()),
        "show": (
            "print a recipe as YAML",
            (
                argument("recipe", help="the name of a shipped recipe, or a file"),
                several("--for", "print the form for these destinations", metavar=NAMES, dest="destinations"),
            ),
        ),
        "check": (
            "read a recipe, and print what it selects in a model",
            (
                argument("recipe", help="a file, or the name of a shipped recipe"),
                argument("--model", help="the model, as for `pt2mx quantize`"),
                _IMPORT,
            ),
        ),
        "schema": ("print the JSON schema of recipes, for editors", ()),
    },
}
