"""Models of one's own: what a factory returns, folders of images for a CNN, and formats of one's own."""

import pytest
import torch

from pt2mx import MXError, load_program
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.checks import check_usage
from pt2mx.pt2e.cli.command import command_parser, main
from pt2mx.pt2e.cli.float_model import load_eval_batches, load_float_model
from pt2mx.pt2e.models.image_files import normalizing_reader
from pt2mx.pt2e.models.names import Normalization

NET = """
import pt2mx
import torch
from torch import nn

pt2mx.register_element("of_net", values=[-1, -0.5, 0, 0.3, 0.6, 1])

def cnn(channels=3):
    torch.manual_seed(0)
    first = nn.Conv2d(channels, 32, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

X, DYNAMIC = torch.ones(2, 3, 32, 48), ({0: torch.export.Dim("n")},)

def make():
    return cnn(), (X,), DYNAMIC

def fixed():
    return cnn(), X

def gray():
    return cnn(1), X[:, :1]

def five():
    return cnn(5), torch.ones(2, 5, 32, 48)

def rows():
    return nn.Linear(4, 4), torch.ones(2, 4)

class Two(nn.Module):
    def forward(self, x, y):
        return x + y

def two():
    return Two(), (X, X)

def named(**more):
    return {"model": cnn(), "example_inputs": X, "dynamic_shapes": DYNAMIC, **more}

def calibrated():
    return named(calibration=(n * torch.ones(n, 3, 32, 48) for n in (1, 3)), transform=lambda image: 2 * X[0])

def labelled():
    data = torch.utils.data.TensorDataset(X, torch.arange(2))
    return named(calibration=torch.utils.data.DataLoader(data))

def by_names():
    return {"model": Two(), "example_inputs": {"x": X, "y": X}, "transform": lambda image: {"x": X[0], "y": 3 * X[0]}}

def empty():
    return named(calibration=[])

def tensor():
    return named(calibration=X)

def unknown():
    return named(calibrations=[X])

def nothing():
    return {"model": cnn()}

def no_function():
    return named(transform=3)

def no_tensor():
    return named(transform=lambda image: image)

def other_size():
    return named(transform=lambda image: torch.ones(3, 8, 8))

def raises():
    def batches():
        yield X
        raise OSError("the disk is gone")
    return named(calibration=batches())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "none").mkdir()


def batches_of(line):
    """Return the batches of a command line, by their sources."""
    options = command_parser().parse_args(f"quantize --recipe mxfp8 --model net.py:{line}".split())
    check_usage(options)
    return load_eval_batches(load_float_model(options), options)


def test_a_dict_gives_what_a_tuple_gives():
    ((x,),) = batches_of("make").values()
    ((same,),) = batches_of("named").values()
    assert torch.equal(x, same) and x.shape == (2, 3, 32, 48)


def test_batches_of_a_factory(photos):
    batches = batches_of("calibrated")
    assert [(source, tuple(x.shape), x.max().item()) for source, (x,) in batches.items()] == [
        ("calibration batch 0", (1, 3, 32, 48), 1.0),
        ("calibration batch 1", (3, 3, 32, 48), 3.0),
    ]
    assert batches_of("calibrated --calibration none") == {}
    batches = batches_of("calibrated --calibration photos")  # the transform prepares images
    assert [x.shape[0] for (x,) in batches.values()] == [2, 2] and all((x == 2).all() for (x,) in batches.values())
    first, _ = batches_of("by_names --calibration photos").values()
    assert torch.equal(first["y"], 3 * first["x"]) and first["x"].shape == (2, 3, 32, 48)


@pytest.mark.parametrize("model", ["make", "calibrated"])
def test_images_are_resized_cropped_and_normalized(model, photos):
    options = "--calibration photos --mean 0.5,0.25,0 --std 0.5"
    first, second = batches_of(f"{model} {options} --image-size 32x48").values()
    assert torch.equal(first[0], next(iter(batches_of(f"fixed {options}").values()))[0])  # the size of the example
    red, lime, blue = ([1.0, -0.5, 0.0], [-1.0, 1.5, 0.0], [-1.0, -0.5, 2.0])
    for (x,), colours in ((first, (red, lime)), (second, (blue, red))):
        want = torch.tensor(colours).view(2, 3, 1, 1).expand(2, 3, 32, 48)
        assert torch.allclose(x, want, atol=0.02)  # JPEG rounds


def test_the_crop_is_of_the_center(tmp_path):
    image = import_extra("PIL.Image", "vision")
    picture = image.new("L", (30, 10))
    picture.paste(255, (10, 0, 20, 10))
    picture.save(tmp_path / "a.png")
    how = Normalization(None, [0.0], [1.0])
    ((x,),) = normalizing_reader(how, "x", (1, 1, 10, 10), torch.float16)([tmp_path / "a.png"]).values()
    assert torch.equal(x, torch.ones(1, 1, 10, 10, dtype=torch.float16))
    ((x,),) = normalizing_reader(Normalization((10, 30), [0.0], [1.0]), "x", (None, None, None, None))(
        [tmp_path / "a.png"]
    ).values()
    assert x.shape == (1, 3, 10, 30) and x[0, :, :, 10:20].min() == 1 and x[0, :, :, :10].max() == 0
    with pytest.raises(MXError, match="'x' has no fixed height and width: give --image-size"):
        normalizing_reader(how, "x", (None, 3, None, None))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make --calibration photos", "make inputs of images"),
        (
            "make --calibration photos --image-size 32",
            r"\(0 to any, 3, 32, 48\) and torch.float32, not \(2, 3, 32, 32\)",
        ),
        ("gray --calibration photos --mean 0,0,0", "--mean has 3 numbers, and the input 'input' 1 channel:"),
        ("make --calibration photos --std 1,1", "--std has 2 numbers, and the input 'input' 3 channels"),
        ("five --calibration photos --mean 0", "'input' has 5 channels, and images have 1"),
        ("rows --calibration photos --mean 0", r"'input' of shape \(2, 4\) and torch.float32 takes no images"),
        ("two --calibration photos --mean 0", "models of one tensor, and this one takes x, y"),
        ("make --calibration none --mean 0", "--mean prepares images: give --calibration a folder"),
        ("make --image-size 32", "--image-size prepares images: give --calibration a folder of .png or .jpg images$"),
        ("make --calibration ./none --std 1", "a folder of .png or .jpg images, not './none'"),
        ("make --calibration photos --image-size 0", "--image-size '0' must be a number of pixels"),
        ("make --calibration photos --image-size 3,4", "or HEIGHTxWIDTH such as 240x320"),
        ("make --calibration photos --std 1 0 1", "--std 1,0,1 must be numbers above 0"),
        ("make --calibration photos --mean red", "--mean red must be numbers, such as"),
        ("make --calibration photos --mean 123.7 --std 58", "--mean 123.7 is above 1, and values of images are in"),
        ("make --calibration photos --mean nan", "--mean nan must be numbers"),
        ("make --calibration ./none", "a transform or --image-size, images"),
        ("labelled", "calibration batch 0: a batch must hold the inputs .*'input'.*, this one holds 2 values"),
        ("empty", "the calibration of net.py:empty holds no batch"),
        ("tensor", "tensor: calibration must be an iterable of batches, not Tensor"),
        ("unknown", "unknown returns 'calibrations', which has no meaning: did you mean 'calibration'"),
        ("nothing", r"nothing must return \(model, example_inputs\)"),
        ("no_function", "transform must be a function of an image, not int"),
        ("no_tensor --calibration photos", "could not prepare photos/a.png, photos/b.JPG: TypeError"),
        ("other_size --calibration photos", r"not \(2, 3, 8, 8\) torch.float32"),
        ("raises", "could not make the calibration batches: OSError: the disk is gone"),
    ],
)
def test_what_cannot_be_a_batch(line, message, photos):
    with pytest.raises(MXError, match=message):
        batches_of(line)


def test_images_of_a_language_model(photos):
    line = "quantize --model hf:org/model --recipe mxfp8 --output folder --calibration photos --mean 0"
    with pytest.raises(MXError, match="--mean is for a program: give --output a name"):
        check_usage(command_parser().parse_args(line.split()))


@pytest.mark.parametrize("command", ["compare", "sensitivity"])
def test_commands_that_evaluate_take_images(command, photos, capsys):
    option = {"compare": "--recipes", "sensitivity": "--formats"}[command]
    assert main([command, "net.py:make", "--calibration", "photos", "--mean", "0.5", option, "mxfp4"]) == 0
    assert "2 batches" in capsys.readouterr().err


def test_an_onnx_file_takes_images(photos, capsys):
    onnx = import_extra("onnx", "onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    w = helper.make_tensor("w", kind, (3, 64), torch.ones(192).tolist())
    x, y = (helper.make_tensor_value_info(n, kind, s) for n, s in (("x", ("n", 3, 8, 8)), ("y", ("n", 64))))
    model = helper.make_model(helper.make_graph(nodes, "net", [x], [y], [w]))
    model.opset_import[0].version, model.ir_version = 21, 10
    onnx.save(model, "net.onnx")
    line = "quantize --model onnx:net.onnx --recipe mxfp8 --output mx.onnx --calibration photos --mean 0.5,0.5,0.5"
    assert main(line.split()) == 0
    assert main([*line.split(), "0.5"]) == 2
    assert "--mean has 4 numbers, and the input 'x' 3 channels" in capsys.readouterr().err


def test_formats_of_a_file(capsys):
    """The file that registers a format comes before the recipe that names it."""
    line = ["quantize", "--model", "net.py:make", "--recipe", "of_net{64}(bf16)", "--output", "net.pt2"]
    assert main(line) == 2
    assert "no recipe 'of_net{64}(bf16)': no file, shipped recipe or format" in capsys.readouterr().err
    assert main([*line, "--import", "net.py"]) == 0
    assert "of_net{64}(bf16)" in capsys.readouterr().out
    assert main(["inspect", "net.pt2", "--import", "net.py"]) == 0
    assert load_program("net.pt2").module()(torch.ones(3, 3, 32, 48)).shape == (3, 10)
    assert main(["recipes", "check", "of_net", "--import", "net.py", "--model", "net.py:make"]) == 0
    assert "mxof_net{32}" in capsys.readouterr().out
