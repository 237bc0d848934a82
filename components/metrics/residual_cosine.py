"""Whether layers still add to the residual stream what they added early in the run."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_prores import RunFolder, logger, register, setting
from titan_prores.components.metrics._probe import Probe, ProbeSection

if TYPE_CHECKING:
    import torch

    from titan_prores import ActivationReader

FILE = "residual_reference.npz"


@register("metrics", "residual_cosine")
class ResidualCosine(Probe):
    """Adds `residual_cosine` to a row: the cosine of each layer's output minus input with that of an early step.

    It is the mean over the tokens of a fixed batch; NaN for a layer that adds nothing. The first measurement at or
    after the reference step, which rows show as `residual_cosine_step`, is kept in the run folder as unit vectors in
    fp16: two bytes for each layer, token and dimension.
    """

    class Config(ProbeSection):
        sequences: int = setting(1, "number of held-out sequences in the fixed batch", gt=0)
        reference_ratio: float = setting(
            0.1,
            "point of the run whose layer outputs are the reference; 0 = the first measurement",
            unit="share of training.steps",
            ge=0,
            lt=1,
        )

    reference: tuple[int, torch.Tensor] | None = None  # step, unit vectors [L, B, S, D] in fp16

    def prepare(self, run: RunFolder, info: Mapping[str, Any], reader: ActivationReader) -> None:
        super().prepare(run, info, reader)
        self.run, self.first_step = run, self.config.reference_ratio * info["total_steps"]
        self.reference = _read(run.path / FILE, self.tokens_BS)
        usable = self.reference is not None and self.reference[0] <= info["start_step"]
        if not all(reader.mesh.gather(usable)):
            self.reference = None

    def look(self, step: int) -> dict[str, Any]:
        if self.reference is not None:
            then, directions_LBSD = self.reference
            found = self.reader.residual_cosines(self.tokens_BS, directions_LBSD)
            return {"residual_cosine": found, "residual_cosine_step": then}
        if step >= self.first_step:
            self.reference = step, self.reader.residual_directions(self.tokens_BS)
            self.run.write_file(FILE, _content(step, self.tokens_BS, self.reference[1]))
            logger.info("residual_cosine: later steps are compared with what layers add in step %d", step)
        return {}


def _content(step: int, tokens_BS: torch.Tensor, directions_LBSD: torch.Tensor) -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.savez(stream, step=step, tokens=tokens_BS.numpy(), directions=directions_LBSD.numpy())
    return stream.getvalue()


def _read(path: Path, tokens_BS: torch.Tensor) -> tuple[int, torch.Tensor] | None:
    """Step and directions of an earlier part of the run; None where there are none for these tokens."""
    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as found:
            if not np.array_equal(found["tokens"], tokens_BS.numpy()):
                return None
            return int(found["step"]), torch.from_numpy(found["directions"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged and will be written anew: %s", path, error)
        return None
