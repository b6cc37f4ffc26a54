import math

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, bisect, compare_stages
from tests.stage_models import GRU, IDS, Normalized, stages


@pytest.mark.slow_except("pt2mx")
@GRU
@pytest.mark.parametrize("target", ["pt2mx", "quark"])
@pytest.mark.compiled_cases("pt2mx")
def test_onnx_files(tmp_path, target):
    x = torch.randn(2, 32, 10, 10, generator=torch.Generator().manual_seed(0))
    exported, forms = stages(Normalized(), (x,), "mxfp8", "mxfp8")
    converted = forms["converted"]
    pt2mx.export_onnx(converted, tmp_path / "net.onnx", (x,), target=target)
    comparison = compare_stages(exported, {"converted": converted, "onnx": tmp_path / "net.onnx"}, [x, -x])
    ours, theirs = ({row.node: row for row in comparison.of_stage(name)} for name in ("converted", "onnx"))
    for node in ("batch_norm", "relu_", "gru[0]", "linear", "output 0"):
        assert theirs[node].operator == ours[node].operator or node in ("batch_norm", "relu_")
        for error in ("isolated", "propagated"):
            pair = [getattr(one[node], error).sqnr for one in (ours, theirs)]
            assert pair[0] == pair[1] or abs(pair[0] - pair[1]) < 0.2 or math.isnan(pair[0])


def test_an_onnx_file_with_a_fault(tmp_path):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    exported, forms = stages(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (x,), "mxfp8", "mxfp8")
    path = tmp_path / "net.onnx"
    pt2mx.export_onnx(forms["converted"], path, (x,))
    assert bisect(forms["converted"], path, x) is None
    model = onnx.load(path)
    (node,) = [n for n in model.graph.node if n.input and n.input[0] == "2.weight_data"]
    (scale,) = [t for t in model.graph.initializer if t.name == node.input[1]]
    twice = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) + np.uint8(1), "twice")
    model.graph.initializer.append(twice)
    node.input[1] = "twice"
    onnx.save(model, path)
    row, *_ = compare_stages(exported, {"onnx": str(path)}, [x]).rows
    assert (row.module, row.node) == ("2", "linear_1") and -2 < row.isolated.sqnr < 2
    worst = bisect(forms["converted"], str(path), x, path=tmp_path / "subgraph.py")
    assert worst.nodes == ("linear_1",) and 0.8 < worst.error < 1.2
    content = torch.load(tmp_path / "subgraph.pt", weights_only=False)
    (want,) = content["first"](*content["inputs"])
    assert (content["outputs"] - want).norm() / want.norm() == pytest.approx(worst.error, rel=1e-5)


@pytest.mark.compiled
def test_files_that_are_no_stage(tmp_path):
    other, _ = stages()
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(MXError, match=r"the stage 'a' is no file: 'nowhere.onnx'"):
        compare_stages(other, {"a": "nowhere.onnx"}, [IDS])
    with pytest.raises(MXError, match=r"text.onnx' is no ONNX file that can be read"):
        compare_stages(other, {"a": tmp_path / "text.onnx"}, [IDS])
    x = torch.randn(4, 64)
    exported, forms = stages(nn.Linear(64, 64), (x,), "mxfp8", "mxfp8")
    pt2mx.export_onnx(forms["converted"], tmp_path / "other.onnx", (x,))
    with pytest.raises(MXError, match=r"the stage 'a' (takes|shares|does not run)"):
        compare_stages(other, {"a": tmp_path / "other.onnx"}, [IDS])
    model = onnx.load(tmp_path / "other.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "without.onnx")
    with pytest.raises(
        MXError, match=r"the stage 'a' does not note what its values are: write it by pt2mx.export_onnx"
    ):
        compare_stages(exported, {"a": tmp_path / "without.onnx"}, [x])
