"""The arguments of the commands that take files, and of those that take none."""

from __future__ import annotations

from pt2mx.pt2e.cli.argument import DEMO_FOLDER, LAYOUTS, OPSETS, TARGETS, Argument, argument, device, flag

#: command -> its arguments
FILE_ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "compile": (
        argument(
            "program",
            help="what `pt2mx quantize` or torch.export.save wrote; the folder of a language model gets packages",
        ),
        argument("--output", help="the package to write; its name ends in .pt2"),
        device("where it runs"),
        flag("--portable", "a package that runs where pt2mx is not installed"),
        flag("--unpack", "keep weights dequantized: larger, mostly faster"),
    ),
    "run": (
        argument("package", help="what `pt2mx compile` wrote"),
        argument("--inputs", help="a .pt or .npz batch; by default what the program was exported with"),
        argument("--output", help="file to write the outputs to, by torch.save; its name ends in .pt"),
    ),
    "inspect": (argument("file", help="a program, a package, or the folder of a quantized language model"),),
    "export-onnx": (
        argument("program", help="what `pt2mx quantize` or torch.export.save wrote"),
        argument("--output", required=True, help="the file to write; its name ends in .onnx"),
        argument("--opset", type=int, help=f"{OPSETS[0]} to {OPSETS[1]}; by default that of torch's exporter"),
        argument("--target", default="pt2mx", help=f"whose nodes: {', '.join(TARGETS)} (default: pt2mx)"),
    ),
    "save-checkpoint": (
        argument("folder", help="what `pt2mx quantize --model hf:... --output FOLDER` wrote"),
        argument("--float", required=True, metavar="CHECKPOINT", help="the checkpoint that it was made of"),
        argument("--output", required=True, help="the folder to write, new or empty"),
        argument("--layout", choices=LAYOUTS, help="of the checkpoint; by default the first that has the formats"),
        argument(
            "--unpack",
            nargs="+",
            action="extend",
            default=[],
            metavar="REGEX",
            help="modules whose weights are written as values, not codes, such as '.*embed_tokens'",
        ),
        argument("--max-shard-size", default="5GB", help="of a file of tensors (default: 5GB)"),
    ),
    "convert-checkpoint": (
        argument("source", help="the folder of the checkpoint: config.json and safetensors"),
        argument("output", help="the folder to write; one of an interrupted run is gone on with"),
        argument("--recipe", default="mxfp4_weight_only", help="a shipped recipe, or the path of one"),
        argument("--layout", default="compressed-tensors", choices=LAYOUTS, help="how codes and scales are held"),
        argument("--dtype", help="of float tensors that stay, such as bfloat16; by default their own"),
        argument("--statistics", help="of inputs, by which GPTQ rounds: a file of save_statistics"),
        argument("--jobs", type=int, default=1, help="shards that are converted at a time"),
    ),
    "demo": (
        argument(
            "--output",
            default=DEMO_FOLDER,
            help=f"the folder for programs, packages and pages (default: {DEMO_FOLDER})",
        ),
    ),
    "completion": (argument("shell", choices=("bash", "zsh", "fish"), help="the shell that is to complete"),),
}

#: command with actions -> action -> (the help text, its arguments)
ACTIONS: dict[str, dict[str, tuple[str, tuple[Argument, ...]]]] = {
    "recipes": {
        "list": ("the shipped recipes, a line each", ()),
        "show": (
            "the YAML of a recipe",
            (argument("recipe", help="the name of a shipped recipe, or a file"),),
        ),
        "check": (
            "read a recipe, and say what it would select of a model",
            (
                argument("recipe", help="a file, or the name of a shipped recipe"),
                argument("--model", help="as `pt2mx quantize` takes it"),
            ),
        ),
        "schema": ("the JSON schema, for editors", ()),
    },
}
