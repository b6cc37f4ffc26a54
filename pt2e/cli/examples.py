"""The examples in `--help`: of each command, what is to be done, and the line that does it."""

#: command -> (what is done, the command line), the commonest first
EXAMPLES = {
    "quantize": (
        ("a pretrained sentence encoder in FP8", "--model minilm --recipe mxfp8 --output minilm.pt2"),
        ("your own model: net.py has a function make()", "--model net.py:make --recipe mxfp4 --calibration batches"),
        ("a language model in 4 bits", "--model hf:SmolLM2-135M-Instruct --recipe mxfp4_decoder --output smollm2"),
        ("a page of every operator's error", "--model torchvision:resnet18 --recipe mxfp6 --report resnet18.html"),
    ),
    "compile": (
        ("a package for the processors of this machine", "minilm.pt2 --output minilm.aoti.pt2"),
        ("one that runs without pt2mx", "minilm.pt2 --output minilm.aoti.pt2 --portable"),
        ("a language model's packages, into its folder", "smollm2"),
    ),
    "generate": (
        ("an answer", 'smollm2 --chat --prompt "What is the capital of France?"'),
        ("prompts from the keyboard, sampled", "smollm2 --temperature 0.7 --top-p 0.9"),
    ),
    "perplexity": (
        ("a quantized model beside its checkpoint", "smollm2 --text book.txt --float SmolLM2-135M-Instruct"),
        ("recipes beside each other", "SmolLM2-135M-Instruct --text book.txt --recipe mxfp8 mxfp4_decoder"),
    ),
    "compare": (
        ("all recipes on a model", "minilm"),
        ("some, with the time of a compiled batch", "net.py:make --recipes mxfp8,mxfp6,mxfp4 --speed"),
    ),
    "sensitivity": (
        ("the modules that stand least", "minilm"),
        ("a recipe of 4.5 bits that follows", "minilm --bits 4.5 --output minilm.yaml"),
    ),
    "run": (
        ("a package, timed with the batch of its export", "minilm.aoti.pt2"),
        ("your own batch, the outputs kept", "minilm.aoti.pt2 --inputs batch.pt --output embeddings.pt"),
    ),
    "inspect": (
        ("formats, bytes and operators of a file", "minilm.pt2"),
        ("for a program", "minilm.aoti.pt2 --json"),
    ),
    "export-onnx": (
        ("nodes of pt2mx's own domain", "minilm.pt2 --output minilm.onnx"),
        ("nodes that onnxruntime has", "minilm.pt2 --output minilm.onnx --target onnxruntime"),
    ),
    "save-checkpoint": (("for transformers and vLLM", "smollm2 --float SmolLM2-135M-Instruct --output smollm2-mxfp4"),),
    "convert-checkpoint": (
        ("file by file, in the memory of a shard", "Qwen3-8B Qwen3-8B-mxfp4"),
        ("other bits, two shards at a time", "Qwen3-8B Qwen3-8B-mxfp8 --recipe mxfp8 --jobs 2"),
    ),
    "recipes": (
        ("the shipped recipes", "list"),
        ("one as a start for your own", "show mxfp4_decoder"),
        ("what it would select of a model", "check mine.yaml --model minilm"),
    ),
    "formats": (
        ("the table", ""),
        ("for a program", "--json"),
    ),
    "demo": (
        ("what `make demo` runs, in some minutes", ""),
        ("kept elsewhere", "--output ~/mx-demo"),
    ),
    "doctor": (
        ("what is there, what is missing, and the command that mends it", ""),
        ("for a bug report", "--json"),
    ),
    "completion": (
        ("in bash, from ~/.bashrc", "bash > ~/.pt2mx.bash && echo 'source ~/.pt2mx.bash' >> ~/.bashrc"),
        ("in zsh, from ~/.zshrc", "zsh > ~/.pt2mx.zsh && echo 'source ~/.pt2mx.zsh' >> ~/.zshrc"),
        ("in fish", "fish > ~/.config/fish/completions/pt2mx.fish"),
    ),
}


def examples_text(command: str) -> str:
    """Return the examples of a command, as `--help` ends."""
    lines = [f"  # {what}\n  pt2mx {command} {line}".rstrip() for what, line in EXAMPLES[command]]
    return "\n".join(["examples:", *lines])
