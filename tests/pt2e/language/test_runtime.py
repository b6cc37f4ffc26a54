import copy

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from pt2mx import LanguageModel, MXError, MXQuantizer, quantize_language_model
from pt2mx.kernels.select import USES
from pt2mx.ops.decoding import decoding_attention
from pt2mx.pt2e.language import decoder, runtime
from pt2mx.pt2e.language.runtime import without_weights
from tests.graph import calls
from tests.language_models import padded, tiny_decoder

QUANTIZER = MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8")


@pytest.mark.compiled
def test_a_decoder_that_takes_its_weights():
    quantized = quantize_language_model(tiny_decoder("llama", num_hidden_layers=1), QUANTIZER)
    model, weights = without_weights(quantized.decoder)
    assert not [*model.parameters(), *model.buffers()] and len(weights) > 12
    ids, _ = padded()
    call = decoder.inputs(quantized.layers, quantized.device, ids)
    again = decoder.inputs(quantized.layers, quantized.device, ids)
    with torch.no_grad():
        assert torch.equal(model(**call, weights=weights), quantized.decoder(**again))


@pytest.mark.compiled
def test_packages(tmp_path, monkeypatch):
    quantized = quantize_language_model(tiny_decoder("llama"), QUANTIZER)
    with pytest.raises(MXError, match="holds no program"):
        quantized.write_packages(tmp_path)
    quantized.save_pretrained(tmp_path, QUANTIZER)
    quantized.write_packages(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path)
    ids, mask = padded()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = quantized.generate(ids, attention_mask=mask, **options)
    assert torch.equal(loaded.generate(ids, attention_mask=mask, **options), expected)
    assert loaded.runner._single.many is not loaded.decoder
    one = loaded(
        ids[:1, :1], logits_to_keep=torch.tensor([0, 0])
    ).logits  # the package for tokens does not take two logits
    assert one.shape == (1, 2, 300)
    # machine code does not check strides and dtypes: pass several, also in chunks
    with torch.no_grad():
        logits = quantized(ids).logits
        for given in (ids, torch.stack([ids, ids], -1)[..., 0], ids.to(torch.int32)):
            assert torch.allclose(loaded(given).logits, logits, atol=1e-5)
        monkeypatch.setitem(runtime._CHUNK, "cpu", 5)
        assert torch.allclose(loaded(ids).logits, logits, atol=1e-5)
    (path,) = tmp_path.glob("token.cpu.*.aoti.pt2")
    path.write_bytes(b"no package")
    with pytest.raises(MXError, match="cannot load"):
        LanguageModel.from_pretrained(tmp_path)(ids)
    quantized.save_pretrained(tmp_path, QUANTIZER)  # this deletes packages of the old program
    assert not path.exists()


@pytest.mark.compiled
def test_packages_that_crash_are_not_left(tmp_path, monkeypatch):
    quantized = quantize_language_model(tiny_decoder("llama"), QUANTIZER)
    quantized.save_pretrained(tmp_path, QUANTIZER)

    def crashes(path, device):
        assert device == quantized.device
        raise MXError("crashes")

    monkeypatch.setattr(runtime, "check_loads", crashes)
    with pytest.raises(MXError, match="crashes"):
        quantized.write_packages(tmp_path)
    assert not [*tmp_path.glob("*.aoti.pt2")]


@pytest.mark.compiled_cases("options2")
@pytest.mark.parametrize("options", [{}, {"mode": "default"}, {"options": {"max_fusion_size": 8}, "fullgraph": True}])
def test_programs_without_guards_on_their_modules(options):
    torch._dynamo.reset()
    programs = [symbolic_trace(nn.Linear(3, 2)) for _ in range(2)]
    given = copy.deepcopy(options)
    compiled = [runtime._compiled(program, options) for program in programs]
    x = torch.randn(4, 3)
    with torch.no_grad():
        for program, call in zip(programs, compiled, strict=True):
            assert torch.allclose(call(input=x), program(x), atol=1e-6)
            program.train(not program.training)
        with torch.compiler.set_stance("fail_on_recompile"):
            for program, call in zip(programs, compiled, strict=True):
                assert torch.allclose(call(input=x), program(x), atol=1e-6)
                with pytest.raises(RuntimeError, match="recompile"):
                    call(input=x.double())
        for other in (x[:3], x.mT.contiguous().mT):
            assert torch.allclose(compiled[0](input=other), programs[0](other), atol=1e-6)
    assert options == given


def test_other_backends_and_unknown_modes():
    program, x = symbolic_trace(nn.Linear(3, 2)), torch.randn(4, 3)
    assert torch.equal(runtime._compiled(program, {"backend": "eager"})(input=x), program(x))
    with pytest.raises(RuntimeError, match="quickly"):
        runtime._compiled(program, {"mode": "quickly"})


@pytest.mark.compiled
def test_the_table_of_uses_says_where_steps_attend(monkeypatch):
    decoder = quantize_language_model(
        tiny_decoder("llama", head_dim=32), MXQuantizer.from_recipe("mxfp4_weight_only")
    ).decoder
    programs = runtime._step_programs(decoder, torch.device("cpu"))
    assert len(calls(programs.few, decoding_attention)) == 2 and programs.few is programs.many
    monkeypatch.setitem(USES, "attend in any step", {})
    assert not calls(runtime._step_programs(decoder, torch.device("cpu")).few, decoding_attention)
