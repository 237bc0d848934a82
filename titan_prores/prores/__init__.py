"""Progressive Residual Warmup, for any PyTorch training loop.

Every residual add `x + F(x)` becomes `x + alpha(l, t) * F(x)`, where alpha warms from 0 to 1, deeper layers later
(arXiv 2603.05369). Write the adds of a model as `ResidualAdd` modules, then::

    prores = ProRes(model, Schedule("linear", n_layers=len(model.layers), T=1000))
    for step, batch in enumerate(batches):
        prores.set_step(step)
        ...

A schedule that is trained (`LearnedSchedule`) or watches the model (`AdaptiveSchedule`) also needs
`prores.after_backward()` between the last backward pass of an update and the optimizer.

Nothing here knows recipes, tensor parallelism, FSDP or float8.
"""

from titan_prores.prores.adaptive import AdaptiveSchedule
from titan_prores.prores.alpha import AlphaVector
from titan_prores.prores.fixed import SCHEDULES, Schedule, check_length
from titan_prores.prores.learned import LearnedSchedule
from titan_prores.prores.residual import ResidualAdd, ScaledResidualAdd
from titan_prores.prores.rewrite import SCHEDULE_NAME, AlphaMovedError, GradientLeftError, ProRes
from titan_prores.prores.schedule import ResidualSchedule, as_schedule
from titan_prores.prores.table import TableSchedule

__all__ = [
    "SCHEDULES",
    "SCHEDULE_NAME",
    "AdaptiveSchedule",
    "AlphaMovedError",
    "AlphaVector",
    "GradientLeftError",
    "LearnedSchedule",
    "ProRes",
    "ResidualAdd",
    "ResidualSchedule",
    "ScaledResidualAdd",
    "Schedule",
    "TableSchedule",
    "as_schedule",
    "check_length",
]
