"""Imported once by the parent that ranks are forked from: what a launch would spend its first seconds importing."""

import importlib

from titan_prores.config import registry
from titan_prores.config.kinds import KINDS

for name in (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "torchao.float8",
    "torchdata.stateful_dataloader",
    "rich.console",
    "setuptools",
    "titan_prores.components.checkpoint._tensors",
    "titan_prores.cli",
    "titan_prores.trainer",
    "tests.integration.launch",
):
    importlib.import_module(name)
for kind in KINDS:
    registry.names(kind)
