"""logsumexp and cross-entropy for losses of your own, of logits that tensor parallelism splits over the vocabulary.

    from titan_prores import vocab_parallel_cross_entropy, vocab_parallel_logsumexp

    loss = vocab_parallel_cross_entropy(logits_BSV, labels_BS, label_smoothing=0.1)
    loss += 1e-4 * vocab_parallel_logsumexp(logits_BSV).square().sum()

Both take plain tensors too, so a loss is written once. Of split logits no rank ever holds more than its own columns:
the ranks exchange a few numbers per row. Computed in fp32 (fp64 logits stay fp64); gradients have the logits' dtype.
Both can be compiled, and neither needs torch's `loss_parallel`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard


def vocab_parallel_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) over the vocabulary, for losses such as the z-loss (PaLM, arXiv 2204.02311).

    Args:
        logits: [..., V], floating point; a plain tensor, or a DTensor split over its last dimension on one axis of its
            mesh and replicated over the others. V need not divide evenly.

    Returns:
        A plain tensor [...], fp32, the same on every rank of the axis.

    Raises:
        ValueError: a DTensor with other placements.
    """
    part, _, group = _own_columns(logits)
    return _RowStatistics.apply(part, None, False, group)[0]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["sum", "mean", "none"] = "sum",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy in nats, as `torch.nn.functional.cross_entropy` defines it.

    Args:
        logits: [..., V], as for `logsumexp`.
        labels: [...], int64 ids of the whole vocabulary; a plain tensor, the same on every rank of the axis. The
            loss of one that is outside of the vocabulary is NaN.
        ignore_index: the label of positions that do not count; their loss and their gradient are 0.
        reduction: "sum" or "mean" over the positions that count (0 and NaN where there are none), or "none".
        label_smoothing: share of the target that is spread evenly over the vocabulary, 0 to 1.

    Returns:
        A plain tensor, fp32, the same on every rank of the axis: a scalar, or [...] for "none".

    Raises:
        ValueError: a DTensor with other placements, an unknown reduction, or a label_smoothing outside of 0 to 1.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction is {reduction!r} (allowed: sum, mean, none)")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing} (allowed: 0 to 1)")
    part, first, group = _own_columns(logits)
    counts = labels != ignore_index
    lse, target, total = _RowStatistics.apply(part, torch.where(counts, labels, 0) - first, label_smoothing > 0, group)
    loss = lse - target
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - total / logits.shape[-1])
    loss = torch.where((labels >= 0) & (labels < logits.shape[-1]), loss, torch.nan)
    loss = torch.where(counts, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()


def _own_columns(logits: torch.Tensor) -> tuple[torch.Tensor, int, ProcessGroup | None]:
    """This rank's columns, the index of the first one, and the group that has the others; None has no others."""
    if not isinstance(logits, DTensor):
        return logits, 0, None
    mesh, last = logits.device_mesh, logits.ndim - 1
    axes = [axis for axis, placement in enumerate(logits.placements) if placement in (Shard(last), Shard(-1))]
    others = [p for axis, p in enumerate(logits.placements) if axis not in axes]
    if len(axes) > 1 or any(placement != Replicate() for placement in others):
        raise ValueError(
            f"logits are placed as {logits.placements} (allowed: Shard({last}), the vocabulary, on one axis of the "
            "mesh and Replicate() on the others)"
        )
    if not axes:
        return logits.to_local(), 0, None
    rows = -(-logits.shape[-1] // mesh.size(axes[0]))  # of each rank but the last ones
    first = min(mesh.get_local_rank(axes[0]) * rows, logits.shape[-1])
    return logits.to_local(), first, mesh.get_group(axes[0])


class _RowStatistics(torch.autograd.Function):
    """Of every row: its logsumexp, its logit at a label and the sum of its logits, over the columns of all ranks.

    One function, so that only the logits are kept for the backward pass and one fp32 tensor of their size is made in
    each direction. What it returns is the same on every rank, and so is the loss made of it: a gradient that arrives is
    already that of the whole, and nothing is summed over ranks in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, labels: torch.Tensor | None, sum_logits: bool, group: ProcessGroup | None
    ) -> tuple[torch.Tensor, ...]:
        logits = part.to(torch.promote_types(part.dtype, torch.float32))
        # With fewer ids than ranks some have none.
        largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
        if group is not None:
            largest = _over_ranks(largest, "max", group)
        largest = torch.where(largest.isinf(), 0.0, largest)  # or a row of -inf alone would give NaN
        sums = [(logits - largest[..., None]).exp().sum(-1)]
        if labels is not None:
            mine, index = _own_labels(labels, part)
            found = logits.gather(-1, index[..., None])[..., 0] if part.shape[-1] else largest
            sums.append(torch.where(mine, found, 0.0))
        if sum_logits:
            sums.append(logits.sum(-1))
        if group is not None:
            sums = list(_over_ranks(torch.stack(sums), "sum", group).unbind())
        lse = sums[0].log() + largest
        ctx.save_for_backward(part, lse, labels)
        ctx.sum_logits = sum_logits
        target = sums[1] if labels is not None else torch.zeros_like(lse)
        return lse, target, sums[2] if sum_logits else torch.zeros_like(lse)

    @staticmethod
    def backward(
        ctx: Any, of_lse: torch.Tensor, of_target: torch.Tensor, of_total: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        part, lse, labels = ctx.saved_tensors
        grad = (part.to(lse.dtype) - lse[..., None]).exp() * of_lse[..., None]
        if ctx.sum_logits:
            grad = grad + of_total[..., None]
        if labels is not None and part.shape[-1]:
            mine, index = _own_labels(labels, part)
            grad = grad.scatter_add(-1, index[..., None], torch.where(mine, of_target, 0.0)[..., None])
        return grad.to(part.dtype), None, None, None


def _own_labels(labels: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are among this rank's columns, and the column of each; of the others any column there is."""
    mine = (labels >= 0) & (labels < part.shape[-1])
    return mine, torch.where(mine, labels, 0)


def _over_ranks(tensor: torch.Tensor, operation: str, group: ProcessGroup) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_reduce(tensor, operation, group))
