"""Perplexity on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from titan_prores import Loss, ValidatorSection, logger, perplexity, register, setting

if TYPE_CHECKING:
    from titan_prores import Mesh, TokenWindows


@register("validator", "perplexity")
class Perplexity:
    """exp of the mean token cross-entropy of the held-out text, every token counted once on any number of ranks."""

    class Config(ValidatorSection):
        max_tokens: int = setting(
            1_000_000,
            "number of tokens to score, in windows evenly spread over the held-out text; 0 scores all",
            unit="tokens",
            ge=0,
        )
        batch_size: int = setting(0, "micro-batch size per data-parallel rank; 0 takes training.local_batch_size", ge=0)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._told = False

    @torch.no_grad()
    def validate(
        self,
        model: nn.Module,
        loss: Loss,
        data: TokenWindows,
        mesh: Mesh,
        batch_size: int,
        stopping: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Loss in nats a token, perplexity, and the number of tokens scored; None where the run is to end.

        alpha of ProRes stays where training has it.
        """
        batch_size = self.config.batch_size or batch_size
        # The same ones each time and on every layout, so that losses compare.
        windows = data.spread(max(self.config.max_tokens // data.seq_len, 1) if self.config.max_tokens else len(data))
        n_windows = len(windows)
        if not self._told:
            self._told = True
            logger.info(
                "validation scores %s of the %s windows of held-out text%s",
                f"{n_windows:,}",
                f"{len(data):,}",
                ", evenly spread" if n_windows < len(data) else "",
            )
        # float64: a long sum of fp32 losses would depend on how it is split over ranks.
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        training = model.training
        model.eval()
        for first in range(0, n_windows, batch_size * mesh.data_size):
            if stopping():
                model.train(training)
                return None
            mine = range(first + mesh.data_rank * batch_size, first + (mesh.data_rank + 1) * batch_size)
            # Every rank runs the same number of forward passes; past the end it scores nothing.
            samples = [data[windows[min(number, n_windows - 1)]] for number in mine]
            tokens_BS = torch.stack([tokens for tokens, _ in samples]).to(mesh.device)
            labels_BS = torch.stack([labels for _, labels in samples]).to(mesh.device)
            labels_BS[torch.tensor([number >= n_windows for number in mine])] = -100
            total[0] += loss(model(tokens_BS), labels_BS)
            total[1] += (labels_BS != -100).sum()
        model.train(training)
        summed, count = mesh.sum_over_data(total).tolist()
        mean = summed / count
        return {"validation_loss": mean, "validation_perplexity": perplexity(mean), "validation_tokens": int(count)}
