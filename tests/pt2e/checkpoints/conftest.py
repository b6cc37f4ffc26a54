import functools
from types import SimpleNamespace

import pytest
import torch

import pt2mx
from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.attention import ATTENTION, register_attention
from pt2mx.pt2e.language.quantize import without_activation_matmuls
from tests.float_checkpoints import float_checkpoint, of_weights
from tests.language_models import FAMILIES, transformers

IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "use_cache": False, "return_dict": False}
_SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 300}
#: families with special layouts in checkpoints
_FAMILIES = {
    **FAMILIES,
    "granitemoe": ("GraniteMoeConfig", {**_SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "llama4": ("Llama4TextConfig", {**_SIZES, "head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4}),
    "roberta": ("RobertaConfig", {**_SIZES, "is_decoder": True}),
    "mamba": ("MambaConfig", {"hidden_size": 64, "vocab_size": 300}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def llama(tmp_path):
    """The folder of a float checkpoint in shards."""
    return float_checkpoint("llama", tmp_path / "float")


@pytest.fixture(scope="session")
def bf16(tmp_path_factory):
    """A tiny model of a family in bfloat16, of one layer, with the buffers of RoPE in float32 as after loading; and its
    graph."""

    @functools.cache
    def make(family, **fields):
        name, sizes = _FAMILIES[family]
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
    """Return a quantizer of settings: regular expression of modules -> (spec of the weight, of the inputs), or None."""

    def make(settings):
        made = pt2mx.MXQuantizer()
        for pattern, specs in settings.items():
            config = None if specs is None else pt2mx.MXQuantizationConfig(weight=specs[0], activation=specs[1])
            made.set_module_name_regex(pattern, config)
        return made

    return make


@pytest.fixture(scope="session")
def convert(quantizer):
    """Quantize a graph by settings, once for all tests, which do not change it."""
    result = {}

    def run(graph, settings):
        key = id(graph), repr(settings)
        if key not in result:
            prepared = pt2mx.prepare_pt2e(graph, without_activation_matmuls(quantizer(settings)))
            result[key] = graph, pt2mx.convert_pt2e(prepared)  # keep the graph, so that its id stays unique
        return result[key][1]

    return run


@pytest.fixture(scope="session")
def logits():
    """The logits of the same tokens: of a graph, of a model of transformers, and of a program with a cache as long as
    the tokens. A program with a cache computes attention with a mask; `mask=True` makes a model do the same."""

    @torch.no_grad()
    def compute(model, mask=False):
        if isinstance(model, torch.fx.GraphModule):
            return model(**INPUTS)[0]
        if isinstance(model, pt2mx.LanguageModel):
            return model.program.module()(**decoder.inputs(model.layers, model.device, IDS))
        if mask and model.config._attn_implementation == "sdpa":
            register_attention()
            model.set_attn_implementation(ATTENTION)
        return model(IDS, use_cache=False).logits

    return compute


@pytest.fixture
def in_format():
    """Convert a float checkpoint as a recipe with a format of weights selects it."""

    def convert(source, output, form, layout, **options):
        return convert_checkpoint(source, output, of_weights(form), layout=layout, **options)

    return convert
