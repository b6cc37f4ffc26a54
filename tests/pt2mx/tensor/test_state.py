"""MXTensors are kept: copies, pickles, checkpoints, safetensors."""

import copy
import io
import pickle

import pytest
import safetensors
import safetensors.torch
import torch

from pt2mx import MXError, MXTensor
from pt2mx.tensor.state import flatten_state, unflatten_state
from tests.mx_tensors import mx, parameter_model, same


@pytest.mark.parametrize("elem", ["fp8_e4m3", "fp6_e2m3", "fp4_e2m1", "nvfp4", "int4{32}(bf16)"])
def test_persistence(elem):
    x = mx(3, 5, 37, elem=elem, dtype=torch.bfloat16).transpose(0, 1)
    for result in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), saved(x, weights_only=True)):
        assert same(result, x) and result.stride() == x.stride() and torch.equal(result.to_dtype(), x.to_dtype())


def test_a_file_that_names_the_type_by_its_older_place(monkeypatch):
    x = mx(3, 37, elem="fp4_e2m1")
    monkeypatch.setattr(MXTensor, "__module__", "pt2mx.tensor")
    assert same(saved(x, weights_only=True), x)


def saved(value: object, **options) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


@pytest.mark.compiled
def test_a_checkpoint_loads_in_another_process(tmp_path, run_python):
    model = parameter_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    code = f"""
import sys
sys.modules["transformers"] = None  # as if it were not installed
import torch, pt2mx
state = torch.load({str(tmp_path / "model.pt")!r}, weights_only=True)
print(state["0.weight"], state["0.weight"].to_dtype().double().sum().item())
"""
    weight = model[0].weight
    assert run_python(code, fresh=True).strip() == f"{weight.data!r} {weight.to_dtype().double().sum().item()}"


def test_safetensors(tmp_path):
    state = {**parameter_model().state_dict(), "t": mx(64, 7, axis=0, dtype=torch.bfloat16).t()}
    tensors, metadata = flatten_state(state)
    assert set(tensors) == {"0.weight.qdata", "0.weight.scale", "0.bias", "1.weight", "1.bias", "t.qdata", "t.scale"}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {**metadata, "format": "pt"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        loaded = unflatten_state({key: file.get_tensor(key) for key in file.keys()}, file.metadata())
    assert set(loaded) == set(state)
    assert same(loaded["0.weight"], state["0.weight"]) and torch.equal(loaded["1.bias"], state["1.bias"])
    assert same(loaded["t"], state["t"]) and torch.equal(loaded["t"].to_dtype(), state["t"].to_dtype())
    nv = {"n": mx(6, 64, elem="nvfp4"), "f": mx(32, 64, elem="fp8_e4m3{16x32}(f32)")}
    tensors_of_nv, metadata_of_nv = flatten_state(nv)
    assert set(tensors_of_nv) == {"n.qdata", "n.scale", "n.tensor_scale", "f.qdata", "f.scale"}
    back = unflatten_state(tensors_of_nv, metadata_of_nv)
    assert all(same(back[name], tensor) for name, tensor in nv.items())
    with pytest.raises(MXError, match=r"its part 't\.scale' is missing"):
        unflatten_state({"t.qdata": tensors["t.qdata"]}, {"pt2mx:t": metadata["pt2mx:t"]})
    with pytest.raises(MXError, match=r"t\.scale is a tensor of the state already"):
        flatten_state({**state, "t.scale": torch.ones(1)})
    assert unflatten_state({"a": torch.ones(1)}, None) == {"a": torch.ones(1)}
