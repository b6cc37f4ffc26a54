import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper

from pt2mx import MXError
from pt2mx.pt2e.onnx import files
from pt2mx.pt2e.onnx.files import check_model, read_model, serialized, write_model
from tests.onnx_float_files import model_of


def network():
    return model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, [3])}, {"y": 1}, {})


def test_a_model_comes_back_from_its_file(tmp_path):
    write_model(network(), tmp_path / "net.onnx")
    assert read_model(tmp_path / "net.onnx") == network()
    assert (tmp_path / "net.onnx").read_bytes() == serialized(network())


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("missing.onnx", "'missing.onnx' is no ONNX file .*No such file"),
        (None, "'None' is no ONNX file .*not NoneType"),
    ],
)
def test_what_is_no_file(path, match):
    with pytest.raises(MXError, match=match):
        read_model(path)


def test_a_model_that_is_larger_than_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LIMIT", 10)
    with pytest.raises(MXError, match=r"the model has more than the 10 bytes of an ONNX file: quantize more of it"):
        write_model(network(), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_a_model_whose_size_protobuf_does_not_count():
    class Huge:
        def ByteSize(self):
            raise EncodeError("Failed to serialize proto")

    with pytest.raises(MXError, match=r"the model has more than the 2,147,483,647 bytes"):
        serialized(Huge())
    check_model(Huge(), "the model")  # it cannot be


def test_a_model_that_is_not_valid(tmp_path):
    model = network()
    model.graph.node[0].input[0] = "z"
    with pytest.raises(MXError, match=r"the model that was written is not valid: .*'z'"):
        write_model(model, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())
