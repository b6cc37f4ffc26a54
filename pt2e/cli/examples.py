"""The examples at the end of `--help`: for each command, tasks and the command lines that do them."""

#: command -> (task, the command line), the most common task first
EXAMPLES = {
    "quantize": (
        ("quantize a pretrained sentence encoder to FP8", "--model minilm --recipe mxfp8 --output minilm.pt2"),
        (
            "quantize your own model: net.py has a function make()",
            "--model net.py:make --recipe mxfp4 --calibration batches",
        ),
        (
            "quantize a language model to 4 bits",
            "--model hf:SmolLM2-135M-Instruct --recipe mxfp4_decoder --output smollm2",
        ),
        (
            "write a page with the error of every operator",
            "--model torchvision:resnet18 --recipe mxfp6 --report resnet18.html",
        ),
    ),
    "compile": (
        ("make a package for the processors of this machine", "minilm.pt2 --output minilm.aoti.pt2"),
        ("make one that runs without pt2mx", "minilm.pt2 --output minilm.aoti.pt2 --portable"),
        ("make a language model's packages, in its folder", "smollm2"),
    ),
    "generate": (
        ("answer a question", 'smollm2 --chat --prompt "What is the capital of France?"'),
        ("read prompts from the keyboard, and sample", "smollm2 --temperature 0.7 --top-p 0.9"),
    ),
    "perplexity": (
        ("compare a quantized model with its checkpoint", "smollm2 --text book.txt --float SmolLM2-135M-Instruct"),
        ("compare recipes", "SmolLM2-135M-Instruct --text book.txt --recipe mxfp8 mxfp4_decoder"),
    ),
    "compare": (
        ("try all recipes on a model", "minilm"),
        ("try some, and time a compiled batch", "net.py:make --recipes mxfp8,mxfp6,mxfp4 --speed"),
    ),
    "sensitivity": (
        ("list the most sensitive modules", "minilm"),
        ("suggest a recipe of 4.5 bits per weight", "minilm --bits 4.5 --output minilm.yaml"),
    ),
    "run": (
        ("time a package with the inputs of the export", "minilm.aoti.pt2"),
        ("run your own batch, and keep the outputs", "minilm.aoti.pt2 --inputs batch.pt --output embeddings.pt"),
    ),
    "inspect": (
        ("print formats, bytes and operators of a file", "minilm.pt2"),
        ("print JSON for a script", "minilm.aoti.pt2 --json"),
    ),
    "export-onnx": (
        ("write nodes of pt2mx's own domain", "minilm.pt2 --output minilm.onnx"),
        ("write nodes that onnxruntime has", "minilm.pt2 --output minilm.onnx --target onnxruntime"),
    ),
    "save-checkpoint": (
        (
            "write a checkpoint for transformers and vLLM",
            "smollm2 --float SmolLM2-135M-Instruct --output smollm2-mxfp4",
        ),
    ),
    "convert-checkpoint": (
        ("quantize file by file, in the memory of one shard", "Qwen3-8B Qwen3-8B-mxfp4"),
        ("use another recipe, and convert two shards at a time", "Qwen3-8B Qwen3-8B-mxfp8 --recipe mxfp8 --jobs 2"),
    ),
    "recipes": (
        ("list the shipped recipes", "list"),
        ("print one to start your own from", "show mxfp4_decoder"),
        ("print what a recipe selects in a model", "check mine.yaml --model minilm"),
    ),
    "formats": (
        ("print the table", ""),
        ("print JSON for a script", "--json"),
    ),
    "demo": (
        ("run what `make demo` runs, in a few minutes", ""),
        ("write to another folder", "--output ~/mx-demo"),
    ),
    "doctor": (
        ("list what is missing, and the command that repairs it", ""),
        ("print JSON for a bug report", "--json"),
    ),
    "completion": (
        ("complete in bash, from ~/.bashrc", "bash > ~/.pt2mx.bash && echo 'source ~/.pt2mx.bash' >> ~/.bashrc"),
        ("complete in zsh, from ~/.zshrc", "zsh > ~/.pt2mx.zsh && echo 'source ~/.pt2mx.zsh' >> ~/.zshrc"),
        ("complete in fish", "fish > ~/.config/fish/completions/pt2mx.fish"),
    ),
}


def examples_text(command: str) -> str:
    """Return the examples of a command, with which its `--help` ends."""
    lines = [f"  # {task}\n  pt2mx {command} {line}".rstrip() for task, line in EXAMPLES[command]]
    return "\n".join(["examples:", *lines])
