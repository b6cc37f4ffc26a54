"""`distill`: train a prepared model to reproduce the outputs of the float program."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from tqdm import tqdm

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.aliasing import written_storages
from pt2mx.fx.graph.tensors import replaced
from pt2mx.pt2e.flow.prepare import PreparedModule
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.optimize.losses import LOSS_SCALE, LOSSES, call_with_batch, check_batches, hold_out

#: evaluations on the held-out batches in an epoch
_EVALUATIONS = 4


def distill(
    prepared: GraphModule,
    float_program: Callable[..., object],
    batches: Sequence[object],
    loss: str | Callable[[object, object], Tensor] | None = None,
    *,
    slices: Sequence[GraphModule] = (),
    epochs: int = 1,
    lr: float = 2e-4,
    seed: int = 0,
    progress: bool = False,
) -> GraphModule:
    """Train a prepared model to reproduce the outputs of the float program ("self-distillation").

    Adam trains all parameters that require a gradient, with a rate that decays to zero. It holds out one batch of
    eight, at most 64 batches, and keeps the step that is best on these. Weights that `optimize` rounded lie exactly on
    the MX grid, so that training starts from the optimized model.

    Args:
        prepared: what `prepare_qat_pt2e` returned, preferably for an optimized model. It is trained in place; its
            parameters and buffers become new tensors, because it shares the old ones with the exported model.
        float_program: the exported float model, or any function of the same arguments that returns the same outputs.
        batches: inputs in the form that `optimize` takes, like those that the model will see. One epoch over thousands
            of sentences is better than many epochs over hundreds. A single batch is not held out.
        loss: "kl_div": the Kullback-Leibler divergence between the classes that both predict, for a model that returns
            logits; classes are the last dimension. "relative" or None: the squared error over the squared output,
            averaged over all float outputs. Or a function (outputs of `prepared`, outputs of `float_program`) -> a
            tensor of one number.
        slices: models that `prepare_qat_pt2e(..., anchor=prepared)` returned, for narrower formats. All train the same
            parameters; the loss is the sum over the models.
        epochs: passes over the batches.
        lr: the rate of the first step.
        seed: seed for the choice of held-out batches, the order of the others, and dropout.
        progress: True shows a bar with the held-out loss.

    Returns:
        `prepared`, in its former mode, for `convert_pt2e`. The same arguments give the same bits.

    Raises:
        MXError: for a model that is not prepared for training or has fake quantization disabled, for slices with other
            parameters, without batches, for an unknown loss, and for one that is no number or has no gradient. An error
            leaves the model unchanged.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-3, 3, 512).outer(torch.linspace(-1, 1, 32)).sin()
        >>> batches = list(x[torch.randperm(512, generator=torch.Generator().manual_seed(0))].split(64))
        >>> exported = torch.export.export(torch.nn.Linear(32, 8).eval(), (batches[0],)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        >>> optimized = pt2mx.optimize(exported, quantizer, batches)
        >>> prepared = pt2mx.prepare_qat_pt2e(optimized, quantizer)
        >>> def error():
        ...     return (prepared(x[:64]) - exported(x[:64])).square().sum()
        >>> before = error()
        >>> prepared is pt2mx.distill(prepared, exported, batches, epochs=20, lr=1e-3)
        True
        >>> bool(error() < before)
        True
    """
    if not isinstance(slices, Sequence):
        raise MXError(f"slices must be a list of models, not one {type(slices).__name__}: pass [model]")
    models = [prepared, *slices]
    for model in models:
        if not isinstance(model, PreparedModule) or not _quantizes(model):
            raise MXError(
                "expected what prepare_qat_pt2e returned, a model that quantizes: see pt2mx.enable_fake_quant"
            )
    if not callable(float_program):
        raise MXError(f"float_program must be a module or a function, not {type(float_program).__name__}")
    check_batches(batches)
    if epochs < 1 or not 0 < lr < math.inf:
        raise MXError(f"epochs={epochs} must be at least 1, and lr={lr} above 0 and finite")
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        raise MXError("no parameter of the prepared model requires a gradient: call requires_grad_() on what to train")
    _check_slices(prepared, slices)
    chosen = "relative" if loss is None else loss
    if isinstance(chosen, str):
        chosen = LOSSES.get(chosen, chosen)
    if not callable(chosen):
        raise MXError(f"unknown loss {loss!r}: {nearest(str(loss), list(LOSSES))}; or give a function")
    devices = {parameter.device for parameter in prepared.parameters() if parameter.is_cuda}
    with _copied_tensors(models), torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed)
        _Distillation(models, float_program, batches, chosen, lr).run(epochs, seed, progress)
    return prepared


class _Distillation:
    """The training of models that share their parameters; a step is a batch."""

    def __init__(
        self,
        models: Sequence[GraphModule],
        float_program: Callable[..., object],
        batches: Sequence[object],
        loss: Callable[[object, object], Tensor],
        lr: float,
    ) -> None:
        self.models, self.float_program, self.batches, self.loss, self.lr = models, float_program, batches, loss, lr
        self.parameters = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
        # in float32, because small steps would be lost in 16 bits; a float32 parameter is its own master
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = torch.optim.Adam(self.masters, lr)

    def run(self, epochs: int, seed: int, progress: bool) -> None:
        """Train, and restore the best step."""
        generator = torch.Generator().manual_seed(seed)
        train, held_out = hold_out(len(self.batches), generator)
        before = self._held_out_errors(held_out)
        if not all(map(math.isfinite, before)):
            shown = ", ".join(map(str, before))
            raise MXError(f"the loss of the held-out batches is {shown} before training: look at inputs and outputs")
        best, state = sum(before), self._state()
        order: list[int] = []
        for _ in range(epochs):
            order += (train[i] for i in torch.randperm(len(train), generator=generator).tolist())
        steps = len(order)
        with tqdm(order, disable=not progress, file=sys.stderr) as bar:
            for step, i in enumerate(bar):
                self.optimizer.param_groups[0]["lr"] = self.lr * (1 - step / steps)
                self._step(self.batches[i])
                if (step + 1) % max(len(train) // _EVALUATIONS, 1) and step + 1 < steps:
                    continue
                error = sum(self._held_out_errors(held_out))
                bar.set_postfix_str(f"held-out loss {error:.4g}")
                if error < best:
                    best, state = error, self._state()
        with torch.no_grad():
            for tensor, value in state.items():
                tensor.copy_(value)

    def _state(self) -> dict[Tensor, Tensor]:
        state = {}
        for model in self.models:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor not in state:
                    state[tensor] = tensor.detach().clone()
        return state

    @torch.enable_grad()
    def _step(self, batch: object) -> None:
        reference = self._reference(batch)
        for model in self.models:
            model.zero_grad()
        for model in self.models:
            error = self._error(model, batch, reference)
            if not error.requires_grad:
                raise MXError("the loss has no gradient: compute it from the outputs of the prepared model")
            (error * LOSS_SCALE).backward()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for model in self.models:
            model.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    @torch.no_grad()
    def _reference(self, batch: object) -> object:
        return call_with_batch(self.float_program, batch)

    def _error(self, model: GraphModule, batch: object, reference: object) -> Tensor:
        error = self.loss(call_with_batch(model, batch), reference)
        if not isinstance(error, Tensor) or error.numel() != 1:
            actual = f"a tensor of {error.numel()}" if isinstance(error, Tensor) else type(error).__name__
            raise MXError(f"the loss must give one number, a tensor, not {actual}")
        return error.reshape(())

    @torch.no_grad()
    def _held_out_errors(self, held_out: list[int]) -> list[float]:
        """Return the loss of each model, the mean over the held-out batches."""
        training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            errors: list[list[Tensor]] = [[] for _ in self.models]
            for i in held_out:
                reference = self._reference(self.batches[i])
                for model, each in zip(self.models, errors, strict=True):
                    each.append(self._error(model, self.batches[i], reference).float())
            return [float(torch.stack(each).mean()) for each in errors]
        finally:
            for model, mode in zip(self.models, training, strict=True):
                model.train(mode)


def _check_slices(prepared: GraphModule, slices: Sequence[GraphModule]) -> None:
    """Raise an MXError unless the models train the same parameters."""
    trained = set(prepared.parameters())
    for model in slices:
        if model is prepared:
            raise MXError("slices holds the prepared model itself, whose loss counts already: leave it out")
        if not trained.issuperset(parameter for parameter in model.parameters() if parameter.requires_grad):
            raise MXError(
                "a slice does not share its parameters with the prepared model: call prepare_qat_pt2e(exported, "
                "quantizer, anchor=prepared) before distill"
            )


@contextmanager
def _copied_tensors(models: Sequence[GraphModule]) -> Iterator[None]:
    """Replace the parameters and buffers, which the exported model shares, with copies that the models share; restore
    them after an error."""
    shared: list[tuple[dict[str, Any], str, Tensor]] = []
    written: set[int] = set()
    tensors: dict[str, Any]
    for model in models:
        written |= written_storages(model)
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                shared += ((tensors, name, tensor) for name, tensor in tensors.items() if tensor is not None)
    copies = replaced(list(dict.fromkeys(tensor for *_, tensor in shared)), written, Tensor.clone)
    for tensors, name, tensor in shared:
        tensors[name] = copies[id(tensor)]
    try:
        yield
    except BaseException:
        for tensors, name, tensor in shared:
            tensors[name] = tensor
        raise


def _quantizes(model: nn.Module) -> bool:
    return any(isinstance(module, MXFakeQuantize) and module.fake_quant_enabled for module in model.modules())
