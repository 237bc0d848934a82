"""logsumexp and cross-entropy of logits split over the vocabulary, against torch's of whole ones in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.spawn import run_ranks
from titan_prores import vocab_parallel_cross_entropy, vocab_parallel_logsumexp
from titan_prores.distributed import vocab_parallel

ROWS = (2, 6)
IGNORED = (0, 3)
CASES = {  # name -> ids in the vocabulary, dtype of the logits, settings
    "even": (8, torch.float32, {}),
    "uneven": (7, torch.float32, {"label_smoothing": 0.1}),
    "all smooth": (7, torch.float64, {"label_smoothing": 1.0, "reduction": "mean"}),
    "each": (7, torch.float32, {"label_smoothing": 0.3, "reduction": "none"}),
    "bf16": (7, torch.bfloat16, {"label_smoothing": 0.1, "reduction": "mean"}),
    "one id": (1, torch.float32, {}),  # the second rank has none
}
WRONG = "wrong columns"


def inputs(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Logits, labels, what the loss of each row counts, settings."""
    size, dtype, settings = CASES[case]
    generator = torch.Generator().manual_seed(size)
    logits = (30 * torch.randn(*ROWS, size, generator=generator)).to(dtype)
    logits[1, 2, -(-size // 2) :] = -torch.inf if not settings else -50.0  # nothing on the second rank
    labels = torch.arange(12).reshape(ROWS) % size
    labels[1, 2] = 0
    labels[IGNORED] = -100
    return logits, labels, torch.linspace(0.5, 2, 12).reshape(ROWS), settings


def evaluate(cross_entropy: Any, logsumexp: Any, logits: torch.Tensor, case: str) -> dict[str, torch.Tensor]:
    """Values and gradients of both functions, and of their sum."""
    _, labels, weights, settings = inputs(case)
    found = {}
    for name, function in {
        "cross_entropy": lambda x: cross_entropy(x, labels, **settings),
        "logsumexp": logsumexp,
        "z-loss": lambda x: cross_entropy(x, labels, **settings) + 1e-2 * logsumexp(x).square(),
    }.items():
        leaf = logits.detach().requires_grad_()
        value = function(leaf)
        assert not isinstance(value, DTensor)
        (value * weights.to(value.dtype)).sum().backward()
        found[f"{name} value"] = value.detach()
        found[f"{name} gradient"] = leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad
    return found


def reference(case: str) -> dict[str, torch.Tensor]:
    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **settings: Any) -> torch.Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **{"reduction": "sum", **settings})
        return loss.view(ROWS) if settings.get("reduction") == "none" else loss

    logits = inputs(case)[0].double()
    return evaluate(cross_entropy, lambda x: torch.logsumexp(x, -1), logits, case)


class Largest(TorchDispatchMode):
    """The most elements along the last dimension of any plain tensor with rows."""

    columns = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes by again, on the tensors inside; shapes of whole ones are found on fake ones
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and out.shape[: len(ROWS)] == ROWS and out.ndim > len(ROWS):
            self.columns = max(self.columns, out.shape[-1])
        return out


def measure(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for case, (size, _, _) in CASES.items():
        whole, labels, *_ = inputs(case)
        logits = distribute_tensor(whole, mesh, [Shard(2)])
        with Largest() as largest:
            leaf = logits.detach().requires_grad_()
            vocab_parallel_cross_entropy(leaf, labels, label_smoothing=0.1).backward()
        assert size == 1 or largest.columns == logits.to_local().shape[-1] < size
        found[case] = evaluate(vocab_parallel_cross_entropy, vocab_parallel_logsumexp, logits, case)
        if size == 1 or case == "all smooth":  # the latter has nothing that the others do not compile
            continue
        torch._dynamo.reset()  # in a run the vocabulary stays as large as it is: here it is not to be taken for dynamic
        compiled = [
            torch.compile(function, backend="aot_eager", fullgraph=True)
            for function in (vocab_parallel_cross_entropy, vocab_parallel_logsumexp)
        ]
        with torch._functorch.config.patch(enable_autograd_cache=False):
            found[f"{case}, compiled"] = evaluate(*compiled, logits, case)
    own = vocab_parallel._own_columns
    vocab_parallel._own_columns = lambda logits: (own(logits)[0], 0, own(logits)[2])
    logits = distribute_tensor(inputs("uneven")[0], mesh, [Shard(2)])
    found[WRONG] = evaluate(vocab_parallel_cross_entropy, vocab_parallel_logsumexp, logits, "uneven")
    vocab_parallel._own_columns = own
    with pytest.raises(ValueError, match=r"logits are placed as .*allowed: Shard\(2\), the vocabulary"):
        vocab_parallel_logsumexp(distribute_tensor(inputs("even")[0], mesh, [Shard(1)]))
    return found


def errors(found: dict[str, torch.Tensor], case: str) -> dict[str, float]:
    """Name of a value or a gradient -> its largest error, relative to the largest value."""
    expected = reference(case)
    assert found.keys() == expected.keys()
    found = {
        name: torch.where(expected[name] == value, expected[name], value.double()) for name, value in found.items()
    }
    return {
        name: float((found[name] - value).nan_to_num(nan=0.0 if value.isinf().any() else torch.inf).abs().max())
        / float(value.nan_to_num(neginf=0.0).abs().max().clamp(min=1e-3))
        for name, value in expected.items()
    }


@pytest.mark.timeout(120)
def test_split_logits_give_what_whole_ones_do() -> None:
    ranks = run_ranks(measure, 2, timeout=100)
    for found in ranks:
        wrong = errors(found.pop(WRONG), "uneven")
        assert wrong.pop("logsumexp value") < 1e-6 and wrong.pop("logsumexp gradient") < 1e-6
        assert min(wrong.values()) > 1e-2, "negative control: labels are looked up in the wrong columns"
        for name, values in found.items():
            case = name.removesuffix(", compiled")
            for what, error in errors(values, case).items():
                tolerance = 1e-2 if case == "bf16" and "gradient" in what else 1e-5
                assert error <= tolerance, f"{what} of {name}: {error:.1e}"
                if "gradient" in what and not what.startswith("logsumexp"):
                    assert (values[what][IGNORED] == 0).all() or what.startswith("z-loss")
    for name, values in ranks[0].items():
        for what, value in values.items():
            assert torch.equal(value, ranks[1][name][what]), f"{what} of {name} differs between ranks"


@pytest.mark.parametrize("case", CASES)
def test_whole_logits(case: str) -> None:
    found = evaluate(vocab_parallel_cross_entropy, vocab_parallel_logsumexp, inputs(case)[0], case)
    for what, error in errors(found, case).items():
        assert error <= (1e-2 if case == "bf16" and "gradient" in what else 1e-5), f"{what}: {error:.1e}"


def test_what_cannot_be_right() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="reduction is 'avg'"):
        vocab_parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64), reduction="avg")
    with pytest.raises(ValueError, match="label_smoothing is 2"):
        vocab_parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64), label_smoothing=2)
    assert vocab_parallel_cross_entropy(logits, torch.tensor([0, 3])).isnan()
    assert vocab_parallel_cross_entropy(logits, torch.full((2,), -100)) == 0


def test_gradients_in_float64() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([4, -100, 0])
    torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, labels, label_smoothing=0.2), logits)
    torch.autograd.gradcheck(vocab_parallel_logsumexp, logits)
