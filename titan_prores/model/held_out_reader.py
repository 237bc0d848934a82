"""What flows through a model on a fixed batch of held-out text: the forward pass that metrics look into.

Shape suffixes: B sequences, S tokens of a sequence (this rank's part of them, where they are split), D dim, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from titan_prores.config.engine_sections import Training
from titan_prores.data import TokenStream, TokenWindows
from titan_prores.distributed.mesh import Mesh
from titan_prores.model.transforms import Transforms
from titan_prores.prores.residual import ResidualAdd, ScaledResidualAdd
from titan_prores.protocols.batch import IGNORED_LABEL, Batch
from titan_prores.protocols.metric import ActivationReader, AddObserver, LayerObserver


class HeldOutReader(ActivationReader):
    """A `ActivationReader` over the run's held-out tokens.

    Compiled blocks ignore hooks that come after their first run, so a pass runs their Python code: no graph is added.
    Every data-parallel rank runs the same batch.

    Args:
        model: transformed, with its weights.
        transforms: of the run.
        mesh: of the run.
        held_out: the held-out tokens.
        training: `seq_len`, and how many sequences a rank takes at once.
    """

    def __init__(
        self, model: nn.Module, transforms: Transforms, mesh: Mesh, held_out: TokenStream, training: Training
    ) -> None:
        self.model, self.transforms, self.mesh = model, transforms, mesh
        self.held_out, self.training = held_out, training

    def tokens(self, sequences: int) -> torch.Tensor:
        windows = TokenWindows(self.held_out, self.training.seq_len)
        return torch.stack([windows[window][0] for window in windows.spread(sequences)])

    @torch.no_grad()
    def forward(
        self, tokens_BS: torch.Tensor, *, layer: LayerObserver | None = None, add: AddObserver | None = None
    ) -> None:
        hooks: list[RemovableHandle] = []
        training = self.model.training
        try:
            for number, block in enumerate(self.model.layers):
                if layer is not None:
                    hooks.append(block.register_forward_hook(_of_layer(layer, number), with_kwargs=True))
                for name, module in block.named_modules() if add is not None else ():
                    if isinstance(module, (ResidualAdd, ScaledResidualAdd)):
                        hooks.append(module.register_forward_hook(_of_add(add, number, name)))
            self.model.eval()
            with self.transforms.computing(), torch.compiler.set_stance("force_eager"):
                for part_BS in tokens_BS.split(self.training.local_batch_size):
                    batch = Batch(part_BS, torch.full_like(part_BS, IGNORED_LABEL), torch.zeros(len(part_BS)).long())
                    batch = self.transforms.prepare_batch(batch.to(self.mesh.device))
                    self.model(batch.tokens_BS, **batch.extras)
        finally:
            for hook in hooks:
                hook.remove()
            self.model.train(training)
        self.transforms.after_evaluation()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mesh.sum_over("tp", tensor)

    def residual_directions(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        found: list[list[torch.Tensor]] = [[] for _ in self.model.layers]
        length = tokens_BS.shape[1]

        def keep(number: int, x_BSD: torch.Tensor, y_BSD: torch.Tensor) -> None:
            unit_BSD = direction(y_BSD - x_BSD).half()
            if unit_BSD.shape[1] < length:
                unit_BSD = self.mesh.concatenate_over("tp", unit_BSD, dim=1)
            found[number].append(unit_BSD.cpu())

        self.forward(tokens_BS, layer=keep)
        return torch.stack([torch.cat(parts) for parts in found])

    def residual_cosines(self, tokens_BS: torch.Tensor, reference_LBSD: torch.Tensor) -> list[float]:
        sums = torch.zeros(2, len(self.model.layers), dtype=torch.float64, device=self.mesh.device)
        done = [0] * len(self.model.layers)

        def compare(number: int, x_BSD: torch.Tensor, y_BSD: torch.Tensor) -> None:
            count, length = x_BSD.shape[:2]
            first = 0 if length == tokens_BS.shape[1] else self.mesh.device_mesh.get_local_rank("tp") * length
            then_BSD = reference_LBSD[number, done[number] : done[number] + count, first : first + length]
            done[number] += count
            then_BSD = direction(then_BSD.to(x_BSD.device).float())  # fp16 has rounded its length
            cosine_BS = (direction(y_BSD - x_BSD) * then_BSD).sum(-1)
            sums[0, number] += cosine_BS.sum(dtype=torch.float64)
            sums[1, number] += ((y_BSD != x_BSD).any(-1) & then_BSD.any(-1)).sum()

        self.forward(tokens_BS, layer=compare)
        total, tokens = self.sum(sums)
        return (total / tokens).tolist()


def direction(x: torch.Tensor) -> torch.Tensor:
    """Vectors along the last dimension divided by their L2 norm; zeros stay zeros."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


def _whole(value: Any) -> torch.Tensor:
    """The first tensor of a module's input or output, fp32; of a DTensor all of it."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).float()


def _of_layer(observer: LayerObserver, number: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        observer(number, _whole(args or list(kwargs.values())), _whole(output))

    return hook


def _of_add(observer: AddObserver, number: int, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        residual_BSD, branch_BSD = map(_whole, args)
        if isinstance(module, ScaledResidualAdd):
            branch_BSD = branch_BSD * _whole(module.alpha)
        observer(number, name, residual_BSD, branch_BSD)

    return hook
