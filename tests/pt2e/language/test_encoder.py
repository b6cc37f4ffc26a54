import pytest
import torch
from torch import nn

from pt2mx import LanguageModel
from pt2mx.pt2e.inspect.inspect_file import inspect_file
from pt2mx.pt2e.language import ranks
from tests.language_models import exported_decoder


@pytest.mark.compiled
def test_a_folder_holds_the_encoder_until_a_model_without_one_is_written(tmp_path):
    (model, program), x = exported_decoder("llama", num_hidden_layers=1), torch.randn(3, 4)
    sizes = {"input": {0: torch.export.Dim.DYNAMIC}}
    encoder = torch.export.export(nn.Linear(4, 4), (), {"input": x}, dynamic_shapes=sizes)
    LanguageModel(program, model.config, encoder=encoder).save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.encoder(input=x[:2]), encoder.module()(input=x[:2]))
    assert len(inspect_file(tmp_path)) == 2
    LanguageModel(program, model.config).save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).encoder is None and not (tmp_path / ranks.ENCODER).exists()
