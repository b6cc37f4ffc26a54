"""`distill`: train a prepared model to reproduce the outputs of the float program."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from tqdm import tqdm

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.aliasing import written_storages
from pt2mx.fx.graph.tensors import replaced, tensor_places
from pt2mx.pt2e.flow.prepare import PreparedModule
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.optimize.expert_steps import initial_state, step_experts
from pt2mx.pt2e.optimize.layers import fill, layered, tensors_by_name
from pt2mx.pt2e.optimize.losses import LOSS_SCALE, LOSSES, call_with_batch, check_batches, hold_out
from pt2mx.pt2e.optimize.schedule import Schedule
from pt2mx.pt2e.optimize.training_checkpoint import Checkpoint, identity
from pt2mx.pt2e.quantizer.experts import expert_parameters


def distill(
    prepared: GraphModule,
    float_program: Callable[..., object],
    batches: Sequence[object],
    loss: str | Callable[[object, object], Tensor] | None = None,
    *,
    slices: Sequence[GraphModule] = (),
    epochs: int = 1,
    lr: float = 2e-4,
    decay: str = "linear",
    warmup: int = 0,
    accumulate: int = 1,
    evaluations: int = 4,
    recompute: bool = False,
    compile: bool = False,
    group: dist.ProcessGroup | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: bool = False,
) -> GraphModule:
    """Train a prepared model to reproduce the outputs of the float program ("self-distillation").

    Adam trains all parameters that require a gradient, in float32 whatever their dtype, with a rate that decays to
    zero. An expert that sees no token in a step keeps its weights, biases and momentum. One batch of eight is held
    out, at most 64 batches, and the step that is best on these is kept. Weights that `optimize` rounded lie exactly on
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
        lr: the highest rate.
        decay: "linear", "cosine" or "constant": how the rate goes down after the warm-up.
        warmup: steps in which the rate rises to `lr`.
        accumulate: batches of a step, on each rank; the gradient is the mean over all.
        evaluations: how often an epoch evaluates the held-out batches.
        recompute: compute the activations of each repeated module again for the gradient ("activation checkpointing"),
            which takes less memory and more time.
        compile: call the repeated modules of both models by torch.compile, or a model without such as a whole; sums
            are in another order then.
        group: ranks that train together, such as `torch.distributed.group.WORLD` under torchrun. Each has a part of the
            parameters of both models (FSDP2), and a step takes `accumulate` batches on each; all ranks give the same
            list of batches. Buffers that the model writes are those of the first rank.
        checkpoint: a folder, which each evaluation writes by torch.distributed.checkpoint. A call with the same
            arguments goes on from there: with as many ranks to the bit, with others up to the order of sums if
            `accumulate` times the ranks stays the same. Another model, recipe, schedule, loss or text is an error;
            another `accumulate` is none, and changes the steps that are left.
        seed: seed for the choice of held-out batches, the order of the others, and dropout.
        progress: True shows a bar with the losses.

    Returns:
        `prepared`, in its former mode, for `convert_pt2e`. The same arguments give the same bits.

    Raises:
        MXError: for a model that is not prepared for training or has fake quantization disabled, for slices with other
            parameters, without batches, for an unknown loss or decay, and for a loss that is no number or has no
            gradient; for a checkpoint of other settings, and slices beside `recompute`, `compile` or a group. An error
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
    schedule = Schedule(epochs, lr, decay, warmup, accumulate, evaluations, seed)
    in_layers = recompute or compile or group is not None
    if slices and in_layers:
        raise MXError("slices train in one process, as they are: leave out recompute, compile and group")
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        raise MXError("no parameter of the prepared model requires a gradient: call requires_grad_() on what to train")
    _check_slices(prepared, slices)
    chosen = "relative" if loss is None else loss
    if isinstance(chosen, str):
        chosen = LOSSES.get(chosen, chosen)
    if not callable(chosen):
        raise MXError(f"unknown loss {loss!r}: {nearest(str(loss), list(LOSSES))}; or give a function")
    devices = {parameter.device for parameter in prepared.parameters() if parameter.is_cuda}
    rank = 0 if group is None else group.rank()
    saved = None
    if checkpoint is not None:
        name = getattr(chosen, "__name__", type(chosen).__name__)
        settings = {**schedule.settings(), "loss": name, **identity(prepared, float_program, batches)}
        saved = Checkpoint(checkpoint, settings, group)
    with _copied_tensors(models), torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed + rank)  # each rank draws its own dropout
        trained, names = models, tensors_by_name(models)
        of_experts = expert_parameters(prepared)
        experts = {name for name, p in prepared.named_parameters(remove_duplicate=False) if p in of_experts}
        if in_layers:
            student, names = layered(prepared, recompute, compile, group)
            trained = [student]
            if isinstance(float_program, GraphModule):
                float_program, _ = layered(float_program, False, compile, group)
        Distillation(trained, float_program, batches, chosen, names, group, experts).run(schedule, progress, saved)
        if in_layers:
            fill(prepared, names)
    return prepared


class Distillation:
    """The training of models that share their parameters."""

    def __init__(
        self,
        models: Sequence[GraphModule],
        float_program: Callable[..., object],
        batches: Sequence[object],
        loss: Callable[[object, object], Tensor],
        names: dict[str, Tensor],
        group: dist.ProcessGroup | None,
        experts: Set[str],
    ) -> None:
        self.models, self.float_program, self.batches, self.loss = models, float_program, batches, loss
        self.names, self.group = names, group
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.trained = {name: tensor for name, tensor in names.items() if tensor.requires_grad}
        # in float32, because small steps would be lost in 16 bits; a float32 parameter is its own master
        self.masters = {name: parameter.detach().float() for name, parameter in self.trained.items()}
        self.optimizer = torch.optim.Adam(self.masters.values())
        self.experts = experts & self.masters.keys()
        for name in self.experts:
            self.optimizer.state[self.masters[name]] = initial_state(self.masters[name])
        # the held-out loss before training, the least one, and the tensors with which it was reached
        self.before = self.best = math.inf
        self.state: dict[str, Tensor] = {}

    def run(self, schedule: Schedule, progress: bool, checkpoint: Checkpoint | None) -> None:
        """Train, and restore the best step."""
        generator = torch.Generator().manual_seed(schedule.seed)
        train, held_out = hold_out(len(self.batches), generator)
        order: list[int] = []
        for _ in range(schedule.epochs):
            order += (train[i] for i in torch.randperm(len(train), generator=generator).tolist())
        together = schedule.accumulate * self.ranks
        steps = schedule.steps(len(train), self.ranks)
        order += order * together  # fills the last step
        often = max(len(train) // schedule.evaluations // together, 1)
        seen = 0 if checkpoint is None else checkpoint.load(self)
        begun = seen // together
        if not seen:
            before = self._held_out_errors(held_out)
            if not all(map(math.isfinite, before)):
                shown = ", ".join(map(str, before))
                raise MXError(f"the held-out loss is {shown} before training: look at inputs and outputs")
            self.before = self.best = sum(before)
            self.state = self._state()
        with tqdm(total=steps, initial=begun, disable=not progress or self.rank > 0, file=sys.stderr) as bar:
            bar.set_postfix_str(f"held-out {self.before:.4g} before training")
            for step in range(begun, steps):
                self.optimizer.param_groups[0]["lr"] = schedule.rate(step, steps)
                chosen = order[step * together : (step + 1) * together]
                error = self._step([self.batches[i] for i in chosen[self.rank :: self.ranks]])
                bar.update()
                if (step + 1) % often and step + 1 < steps:
                    continue
                self._share_buffers()
                held_out_error = sum(self._held_out_errors(held_out))
                bar.set_postfix_str(f"loss {error:.4g}, held-out {held_out_error:.4g}, {self.before:.4g} before")
                if held_out_error < self.best:
                    self.best, self.state = held_out_error, self._state()
                if checkpoint is not None:
                    checkpoint.save(self, (step + 1) * together)
        with torch.no_grad():
            for name, value in self.state.items():
                self.names[name].copy_(value)

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.names.items()}

    @torch.enable_grad()
    def _step(self, batches: Sequence[object]) -> Tensor:
        """Return the loss of the first batch, before the step."""
        self._forget_gradients()
        errors = []
        for batch in batches:
            reference = self._reference(batch)
            for model in self.models:
                error = self._error(model, batch, reference)
                if not error.requires_grad:
                    raise MXError("the loss has no gradient: compute it from the outputs of the prepared model")
                (error * (LOSS_SCALE / len(batches))).backward()
                errors.append(error.detach())
        (group,) = self.optimizer.param_groups
        for name, master in self.masters.items():
            gradient = self.trained[name].grad
            if gradient is None:
                continue
            if name in self.experts:
                state = self.optimizer.state[master]
                step_experts(master, gradient.float(), state, group["lr"], group["betas"], group["eps"])
            else:
                master.grad = gradient.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._forget_gradients()
        with torch.no_grad():
            for name, master in self.masters.items():
                if self.trained[name].dtype != master.dtype:
                    self.trained[name].copy_(master)
        return errors[0]

    def _forget_gradients(self) -> None:
        for tensor in self.names.values():
            tensor.grad = None

    def _share_buffers(self) -> None:
        """Give all ranks what the models of the first have written to their buffers."""
        if self.group is not None:
            for tensor in self.names.values():
                if not isinstance(tensor, nn.Parameter):
                    dist.broadcast(tensor, group=self.group, group_src=0)

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
            # all ranks call the models equally often: one without a batch of its own repeats one that does not count
            for i in range(self.rank, -(-len(held_out) // self.ranks) * self.ranks, self.ranks):
                batch = self.batches[held_out[i % len(held_out)]]
                reference = self._reference(batch)
                for model, each in zip(self.models, errors, strict=True):
                    error = self._error(model, batch, reference).float()
                    if i < len(held_out):
                        each.append(error)
            return [self._mean(each) for each in errors]
        finally:
            for model, mode in zip(self.models, training, strict=True):
                model.train(mode)

    def _mean(self, errors: list[Tensor]) -> float:
        """Return the mean over the errors of all ranks."""
        if self.group is None:
            return float(torch.stack(errors).mean())
        gathered: list[list[float]] = [[]] * self.ranks
        dist.all_gather_object(gathered, [float(error) for error in errors], group=self.group)
        every = [error for rank in gathered for error in rank]
        return math.fsum(every) / len(every)


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
    written = set().union(*map(written_storages, models))
    shared = [place for model in models for place in tensor_places(model)]
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
