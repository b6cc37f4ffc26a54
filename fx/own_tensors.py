"""The parameters and buffers of a converted model, made its own."""

from collections.abc import Callable

from torch import Tensor, nn


def own_tensors(model: nn.Module, own: Callable[[Tensor], Tensor]) -> None:
    """Put `own(tensor)` in the place of every parameter and buffer, of a tied one once. Without gradient: under
    torch.compile an operator without one fails where one is asked for. Changes `model`, not the tensors."""
    owned: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in owned:
                    value = own(tensor.detach())
                    owned[tensor] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
                tensors[name] = owned[tensor]
