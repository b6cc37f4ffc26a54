import functools
from types import SimpleNamespace

import pytest
import torch

import pt2mx
from pt2mx.pt2e.language import attention, decoder
from pt2mx.pt2e.language.quantize import without_products_of_activations
from tests.language_models import FAMILIES, transformers

IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "use_cache": False, "return_dict": False}


@pytest.fixture(scope="session")
def bf16(tmp_path_factory):
    """A tiny model of a family in bfloat16, of one layer, as it is loaded: with the buffers of RoPE in float32; and its
    graph."""

    @functools.cache
    def make(family, **fields):
        name, sizes = FAMILIES[family]
        torch.manual_seed(0)
        config = getattr(transformers, name)(**{**sizes, "num_hidden_layers": 1, "pad_token_id": 257, **fields})
        folder = tmp_path_factory.mktemp("float") / family
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            graph = torch.export.export(model, (), INPUTS, strict=False).module()
        return SimpleNamespace(model=model, graph=graph, folder=folder)

    return make


@pytest.fixture(scope="session")
def quantizer():
    """The quantizer of settings: regular expression of modules -> (spec of the weight, of the inputs), or None."""

    def make(settings):
        made = pt2mx.MXQuantizer()
        for pattern, specs in settings.items():
            config = None if specs is None else pt2mx.MXQuantizationConfig(weight=specs[0], activation=specs[1])
            made.set_module_name_regex(pattern, config)
        return made

    return make


@pytest.fixture(scope="session")
def convert(quantizer):
    """A graph, quantized by settings."""

    def run(graph, settings):
        return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, without_products_of_activations(quantizer(settings))))

    return run


@pytest.fixture(scope="session")
def logits():
    """The logits of the same tokens: of a graph, of a model of transformers, and of a program with a cache as long as
    the tokens. What has a cache computes attention in its own way (`mask=True`), which a model can, too."""

    @torch.no_grad()
    def compute(model, mask=False):
        if isinstance(model, torch.fx.GraphModule):
            return model(**INPUTS)[0]
        if isinstance(model, pt2mx.LanguageModel):
            return model.program.module()(**decoder.inputs(model.layers, model.device, IDS))
        if mask and model.config._attn_implementation == "sdpa":
            attention.register()
            model.set_attn_implementation(attention.NAME)
        return model(IDS, use_cache=False).logits

    return compute
