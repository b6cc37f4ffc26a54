"""torchao: static INT8 of activations and weights in the PT2 export flow, as for X86 CPUs.

Activations have one scale for each tensor, weights one for each output channel.
"""

import torch
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> nn.Module:
    shapes = ({0: torch.export.Dim("batch", max=1024)},)
    model = torch.export.export(job.model, (job.inputs[:2],), dynamic_shapes=shapes).module()
    for node in model.graph.nodes:
        if (
            node.target == torch.ops.aten.hardtanh.default
        ):  # two convolutions share a ReLU6, which the quantizer refuses
            del node.meta["nn_module_stack"], node.meta["torch_fn"]
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = move_exported_model_to_eval(prepare_pt2e(model, quantizer))
    with torch.no_grad():
        for batch in job.inputs.split(32):
            prepared(batch)
    return convert_pt2e(prepared)


if __name__ == "__main__":
    run(quantize)
