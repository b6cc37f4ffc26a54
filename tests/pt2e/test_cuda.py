"""The flow on an NVIDIA GPU."""

import pytest
import torch

import pt2mx
from pt2mx import FORMATS, MXQuantizer, get_default_mx_quantization_config
from pt2mx.extras import import_extra
from tests.pt2e.test_prepare import INPUTS, Net

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_converted_is_prepared_to_the_bit(name, dtype, quantize):
    model, inputs = Net().eval().to("cuda", dtype), (INPUTS[0].to("cuda", dtype),)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    want, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), want)
    assert all(t.device.type == "cuda" for t in converted.state_dict().values())


def test_a_bert_layer_compiles_and_agrees(quantize, tmp_path):
    transformers = import_extra("transformers", "hf")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval().cuda()
    model.register_forward_hook(lambda module, inputs, output: output.to_tuple())
    inputs = (torch.randint(99, (2, 33), device="cuda"),)
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)},)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    want, _, converted = quantize(program, MXQuantizer.from_recipe("mxfp4_weight_only"), inputs)
    assert torch.equal(converted(*inputs)[0], want[0])
    torch.export.save(torch.export.export(converted, inputs, dynamic_shapes=shapes), tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.equal(loaded(*inputs)[0], want[0])
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.allclose(torch.compile(converted)(*inputs)[0], want[0], rtol=1e-3, atol=1e-3)
    assert pt2mx.quantization_report(converted).effective_bits < 6
