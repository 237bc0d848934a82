"""What goes from the data loader to model and loss."""

from __future__ import annotations

# Label of a position that no loss counts, as torch.nn.functional.cross_entropy has it.
IGNORED_LABEL = -100
