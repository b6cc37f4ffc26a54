"""Write `files/`, what a version of pt2mx made, and `results.json`, what that version computed of it.

    python -m tests.earlier.write

It ran once, at pt2mx 0.2.0's commit b7d74bd3 with torch 2.13 and transformers 5.24: `test_earlier_files.py` compares
what later versions read. Run it again only to add a kind of file, in a clone of that commit.
"""

import json
import tempfile

import torch
from torch import nn

import pt2mx
from tests.earlier.read import FILES, paths, results_of

#: format of a whole model -> bits that a reader could lose: scales, rows, tensor scales
RECIPES = {
    "mxfp8": "mxfp8",
    "mxfp6": "mxfp6",
    "mxfp4": "mxfp4",
    "mxint8": "mxint8",
    "nvfp4": "nvfp4",
    "weights": "mxfp4_weights_mxfp8_activations",
}
#: specs that no recipe has
SPECS = ("mxfp8{128x128}", "mxfp4{16}(rceil)", "mxfp8_e5m2{32}(ceil)", "nvfp4", "mxfp6_e3m2{32}(even)")


class Network(nn.Module):
    """A convolution with its norm, a linear layer and an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(256, 32)

    def forward(self, x, tokens):
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(x.flatten(1)) @ self.embedding(tokens).transpose(0, 1)


def network(train: bool = False) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = Network()
    inputs = torch.randn(2, 4, 8, 4), torch.arange(5)
    return model.train(train), inputs


def without_paths(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take the lines of source out of a program: they name folders of the machine that wrote it."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)
    return program


def write_programs() -> None:
    for name, recipe in RECIPES.items():
        model, inputs = network()
        quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
        exported = torch.export.export(model, inputs).module()
        prepared = pt2mx.prepare_pt2e(exported, quantizer)
        prepared(*inputs)
        torch.save(prepared.state_dict(), FILES / f"prepared_{name}.pt")
        converted = pt2mx.convert_pt2e(prepared)
        pt2mx.save_program(
            without_paths(torch.export.export(converted, inputs)), FILES / f"program_{name}.pt2", quantizer
        )
        if name != "nvfp4":
            pt2mx.export_onnx(without_paths(torch.export.export(converted, inputs)), FILES / f"program_{name}.onnx")
        lowered = pt2mx.lower_to_inductor(converted)
        pt2mx.save_program(
            without_paths(torch.export.export(lowered, inputs)), FILES / f"lowered_{name}.pt2", quantizer
        )


def write_training() -> None:
    model, inputs = network(train=True)
    exported = torch.export.export(model, inputs).module()
    student = pt2mx.prepare_qat_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
    student(*inputs).sum().backward()
    torch.save(student.state_dict(), FILES / "student.pt")


def write_pickles() -> None:
    torch.manual_seed(0)
    weight = torch.randn(130, 256)
    specs = {text: pt2mx.parse(text) for text in SPECS}
    torch.save(specs, FILES / "specs.pt")
    torch.save({text: pt2mx.MXTensor.to_mx(weight[:20], specs[text]) for text in SPECS}, FILES / "tensors.pt")
    config = pt2mx.get_default_mx_quantization_config(weight="mxfp4", activation="mxfp8")
    torch.save(pt2mx.MXQuantizer().set_global(config).set_module_name("fc", None), FILES / "quantizer.pt")
    scheme = pt2mx.mx_qspec(pt2mx.parse("mxfp4")).qscheme
    for name, kind in {"observer": pt2mx.MXObserver, "fake_quantize": pt2mx.MXFakeQuantize}.items():
        module = kind(scheme)
        module(weight)
        torch.save(module, FILES / f"{name}.pt")


def write_language() -> None:
    from tests.language_models import tiny_decoder, tokenizer_of_bytes

    for name, recipe in {"mxfp4": "mxfp4_weight_only", "decoder": "mxfp4_decoder"}.items():
        model = tiny_decoder("llama", dtype="bfloat16", num_hidden_layers=1)
        texts = [torch.arange(1, 33).reshape(1, 32)]
        quantized = pt2mx.quantize_language_model(model, pt2mx.MXQuantizer.from_recipe(recipe), texts)
        without_paths(quantized.program)
        quantized.tokenizer = tokenizer_of_bytes()
        quantized.save_pretrained(FILES / f"language_{name}", recipe)
    model = tiny_decoder("llama", dtype="bfloat16", num_hidden_layers=1, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for layout, recipe in {
            "compressed-tensors": "mxfp4_weight_only",
            "modelopt": "mxfp8",
            "quark": "mxfp4",
            "gguf": "mxfp4_weight_only",
        }.items():
            output = FILES / (f"checkpoint_{layout}" + ".gguf" * (layout == "gguf"))
            pt2mx.convert_checkpoint(folder, output, recipe, layout=layout)


def main() -> None:
    FILES.mkdir()
    write_programs()
    write_training()
    write_pickles()
    write_language()
    results = {path.name: results_of(path) for path in paths()}
    (FILES.parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
