"""The environments: the packages that each moves away from `constraints.txt`, and the tests that run there."""

from typing import NamedTuple

#: the flow: what calls torch.export and torchao
_FLOW = ("tests/pt2e/quantizer", "tests/pt2e/flow", "tests/pt2e/program", "tests/pt2e/observe/test_torchao_pt2e.py")
#: what reaches into torch, in minutes on one core: the flow, graphs and their lowering, operators, tensor subclasses
_CORE = (
    *_FLOW,
    "tests/fx/graph",
    "tests/fx/test_*.py",
    "tests/pt2mx/ops/test_contract.py",
    "tests/pt2mx/ops/test_quantization.py",
    "tests/pt2mx/tensor",
)
_ONNX = ("tests/pt2e/onnx", "tests/pt2e/debug/test_onnx_stage.py", "tests/pt2e/cli/test_export_onnx.py")


class Environment(NamedTuple):
    """Packages that move away from `constraints.txt`, and the tests that run with them.

    Args:
        moved: requirements of pip; a name alone means the newest version that fits the others.
        tests: files and folders, as patterns.
        marks: pytest's `-m`.
        tested: whether `make test` runs these tests with the pinned versions, so that these need no environment.
    """

    moved: tuple[str, ...]
    tests: tuple[str, ...]
    marks: str = "not slow and not compiled and not cuda"
    tested: bool = True


#: name -> environment. Each moves one neighbour, so that a failure names its cause; the last one moves all of them
ENVIRONMENTS: dict[str, Environment] = {
    "torch-2.14": Environment(("torch==2.14.*", "torchvision"), _CORE),
    "torch": Environment(("torch", "torchvision"), _CORE),
    "torchao": Environment(("torchao",), _FLOW),
    "transformers": Environment(("transformers",), ("tests/pt2e/checkpoints", "tests/pt2e/language")),
    "compressed-tensors": Environment(("compressed-tensors",), ("tests/pt2e/checkpoints",)),
    "onnx": Environment(("onnx", "onnxscript", "onnxruntime"), _ONNX),
    "openvino": Environment(("openvino",), ("tests/pt2e/onnx/test_openvino.py",), marks="not cuda", tested=False),
    "everything": Environment(
        (
            *("torch", "torchvision", "torchao", "transformers", "compressed-tensors"),
            *("onnx", "onnxscript", "onnxruntime", "openvino"),
        ),
        (*_FLOW, *_ONNX, "tests/pt2e/checkpoints"),
    ),
}
