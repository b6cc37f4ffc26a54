import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.algorithms import LearnedRounding
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.optimize.learned_rounding import learn_rounding

pytestmark = pytest.mark.cuda

QUANTIZER = pt2mx.MXQuantizer.from_recipe("mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_rounding_and_distillation_of_a_model_on_a_gpu(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32)).eval().to("cuda", dtype)
    mixing = torch.randn(6, 32) / 6**0.5
    batches = [(torch.randn(128, 6) @ mixing).to("cuda", dtype) for _ in range(9)]
    x = batches.pop()
    exported = torch.export.export(model, (x,)).module()
    expected = exported(x).float()

    def error(prepared):
        return (pt2mx.convert_pt2e(prepared)(x).float() - expected).square().sum()

    learned = copy_sharing_tensors(exported)
    (block,) = learn_rounding(learned, exported, QUANTIZER, batches, LearnedRounding(steps=60), {})
    assert block.after < 0.9 * block.before
    nearest, rounded, trained = (pt2mx.prepare_qat_pt2e(graph, QUANTIZER) for graph in (exported, learned, learned))
    pt2mx.distill(trained, exported, batches, epochs=20, lr=3e-3)
    assert all(tensor.device.type == "cuda" for tensor in [*learned.parameters(), *trained.parameters()])
    assert error(trained) < error(rounded) < error(nearest)
