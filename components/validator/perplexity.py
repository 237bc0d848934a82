"""Perplexity on held-out text."""

from __future__ import annotations

import torch

from titan_prores import (
    IGNORED_LABEL,
    Batch,
    ValidationContext,
    ValidatorSection,
    logger,
    perplexity,
    register,
    setting,
)


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
    def validate(self, context: ValidationContext) -> dict[str, float] | None:
        """Loss in nats a token, perplexity, and the number of tokens scored; None where the run is to end.

        alpha of ProRes stays where training has it.
        """
        model, data, mesh = context.model, context.held_out, context.mesh
        batch_size = self.config.batch_size or context.batch_size
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
            if context.stopping():
                model.train(training)
                return None
            mine = range(first + mesh.data_rank * batch_size, first + (mesh.data_rank + 1) * batch_size)
            # Every rank runs the same number of forward passes; past the end it scores nothing.
            numbers = [windows[min(number, n_windows - 1)] for number in mine]
            tokens, labels = zip(*(data[number] for number in numbers), strict=True)
            labels_BS = torch.stack(labels)
            labels_BS[torch.tensor([number >= n_windows for number in mine])] = IGNORED_LABEL
            total += context.score(Batch(torch.stack(tokens), labels_BS, torch.tensor(numbers)))
        model.train(training)
        summed, count = mesh.sum_over_data(total).tolist()
        mean = summed / count
        return {"validation_loss": mean, "validation_perplexity": perplexity(mean), "validation_tokens": int(count)}
