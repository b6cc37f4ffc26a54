"""What a file of an earlier version holds, as a few numbers and digests: the same in every version that reads it."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

import pt2mx

FILES = Path(__file__).parent / "files"


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of every program: values of all sizes, without random numbers."""
    values = torch.linspace(-3, 3, 2 * 4 * 8 * 4).sin() * torch.linspace(-8, 2, 2 * 4 * 8 * 4).exp2()
    return values.reshape(2, 4, 8, 4), torch.arange(5)


def digest(tensors: dict[str, object]) -> str:
    """Return a digest of names, dtypes, shapes and bits. Values that are no tensors count by their text."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor):
            sha.update(f"{name} {tensor}".encode())
            continue
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def weights_of(program: object) -> str:
    """Return a digest of codes, scales, formats and names of all packed weights."""
    found = {}
    for weight in pt2mx.packed_weights(program):
        found |= {f"{weight.name} {field}": getattr(weight, field) for field in weight._fields if field != "spec"}
        found |= {f"{weight.name} spec": str(weight.spec), f"{weight.name} values": weight.dequantized()}
    return digest(found)


def of_program(path: Path) -> dict[str, object]:
    program = pt2mx.load_program(path)
    with torch.no_grad():
        output = program.module()(*inputs())
    calls = [str(node.target) for node in program.graph.nodes if "pt2mx" in str(node.target)]
    return {"weights": weights_of(program), "calls": calls, "output": numbers(output)}


def of_onnx(path: Path) -> dict[str, object]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [one.name for one in session.get_inputs()]
    feeds = dict(zip(names, (value.numpy() for value in inputs()), strict=True))
    return {"output": numbers(torch.from_numpy(session.run(None, feeds)[0]))}


def of_state(path: Path) -> dict[str, object]:
    """Load the state of a prepared model, or of a student, into one that is made anew."""
    from tests.earlier.write import RECIPES, network

    state = torch.load(path, weights_only=False)
    train = path.stem == "student"
    recipe = "mxfp4" if train else RECIPES[path.stem.removeprefix("prepared_")]
    model, example = network(train)
    exported = torch.export.export(model, example).module()
    prepare = pt2mx.prepare_qat_pt2e if train else pt2mx.prepare_pt2e
    prepared = prepare(exported, pt2mx.MXQuantizer.from_recipe(recipe))
    prepared.load_state_dict(state)
    return {"state": digest(prepared.state_dict()), "converted": weights_of(pt2mx.convert_pt2e(prepared))}


def of_pickle(path: Path) -> dict[str, object]:
    """Read a pickle, and use what it holds."""
    found = torch.load(path, weights_only=False)
    values = inputs()[0].reshape(8, 32)
    if path.stem == "specs":
        return {text: digest({"": pt2mx.fake_quantize_mx(values, spec)}) for text, spec in found.items()}
    if path.stem == "tensors":
        return {text: digest({"": tensor.to_dtype(torch.float32)}) for text, tensor in found.items()}
    if path.stem == "quantizer":
        return {"text": str(found), "recipe": found.to_recipe()}
    return {"values": digest({"": found(values)}), "state": digest(found.state_dict())}


def of_language(path: Path) -> dict[str, object]:
    return of_decoder(pt2mx.LanguageModel.from_pretrained(path))


def of_checkpoint(path: Path) -> dict[str, object]:
    return of_decoder(pt2mx.load_checkpoint(path))


def of_decoder(model: pt2mx.LanguageModel) -> dict[str, object]:
    tokens = model.generate(torch.arange(2, 12).reshape(1, 10), max_new_tokens=4, do_sample=False)
    return {"weights": weights_of(model.program), "tokens": tokens.flatten().tolist()}


def numbers(tensor: torch.Tensor) -> list[float]:
    """Return a few values: other processors add in another order, so the last digits differ."""
    return [round(value, 3) for value in tensor.float().flatten()[:: tensor.numel() // 7].tolist()]


#: files -> what reads them
KINDS: dict[str, Callable[[Path], dict[str, object]]] = {
    "program_*.pt2": of_program,
    "lowered_*.pt2": of_program,
    "program_*.onnx": of_onnx,
    "prepared_*.pt": of_state,
    "student.pt": of_state,
    "specs.pt": of_pickle,
    "tensors.pt": of_pickle,
    "quantizer.pt": of_pickle,
    "observer.pt": of_pickle,
    "fake_quantize.pt": of_pickle,
    "language_*": of_language,
    "checkpoint_*": of_checkpoint,
}


def paths() -> list[Path]:
    """Return all files of earlier versions."""
    return sorted(path for pattern in KINDS for path in FILES.glob(pattern))


def results_of(path: Path) -> dict[str, object]:
    """Return what this version reads of a file."""
    return next(read(path) for pattern, read in KINDS.items() if path.match(pattern))
