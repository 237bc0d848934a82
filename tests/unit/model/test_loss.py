"""The plain cross-entropy, and losses that descend more than it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from titan_prores.model.loss import as_terms, cross_entropy, gives_cross_entropy
from titan_prores.model.transforms import Transforms
from titan_prores.protocols.loss import LossTerms


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 3] = labels[1, 0] = -100
    return logits, labels


def test_cross_entropy_is_its_definition_in_float64() -> None:
    logits, labels = example()
    chosen = [(b, s) for b in range(2) for s in range(5) if labels[b, s] != -100]
    expected = sum(
        math.log(sum(math.exp(x) for x in logits[b, s].tolist())) - logits[b, s, labels[b, s]].item() for b, s in chosen
    )
    assert cross_entropy(logits, labels).item() == pytest.approx(expected, rel=1e-6)
    assert cross_entropy(logits.bfloat16(), labels).dtype == torch.float32
    assert cross_entropy(logits, torch.full_like(labels, -100)).item() == 0


def test_total_is_the_sum_of_all_terms_and_a_tensor_is_the_cross_entropy() -> None:
    terms = LossTerms(torch.tensor(2.0), {"z_loss": torch.tensor(0.5), "smoothing": torch.tensor(0.25)})
    assert terms.total.item() == 2.75 and as_terms(terms) is terms
    plain = torch.tensor(3.0)
    assert as_terms(plain).total is plain and as_terms(plain).cross_entropy is plain


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


def as_terms_smoothed(logits: torch.Tensor, labels: torch.Tensor) -> LossTerms:
    plain = cross_entropy(logits, labels)
    return LossTerms(plain, {"smoothing": smoothed(logits, labels) - plain})


def test_what_is_not_the_cross_entropy_is_noticed() -> None:
    assert gives_cross_entropy(cross_entropy) and gives_cross_entropy(as_terms_smoothed)
    assert not gives_cross_entropy(smoothed)
    assert not gives_cross_entropy(lambda logits, labels: cross_entropy(logits, labels) / 3)

    def picky(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise ValueError("only logits of 32000")

    assert gives_cross_entropy(picky), "it cannot be tried"


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (None, "NoneType"),
        ((torch.tensor(1.0), {}), "tuple"),
        (torch.ones(2, 5), r"a tensor of shape \[2, 5\]"),
        (LossTerms(torch.tensor(1.0), {"z_loss": 0.5}), "float"),
    ],
)
def test_what_a_loss_cannot_return_is_refused_before_the_run(found, what) -> None:
    with pytest.raises(TypeError, match=f"a loss returns a scalar tensor, or LossTerms of scalar tensors, not {what}"):
        gives_cross_entropy(lambda logits, labels: found)


@pytest.mark.parametrize("name", ["grad_norm", "validation_loss"])
def test_a_term_cannot_have_the_name_of_a_key_of_every_row(name) -> None:
    with pytest.raises(ValueError, match=f"called {name}"):
        gives_cross_entropy(lambda logits, labels: LossTerms(cross_entropy(logits, labels), {name: torch.tensor(0.0)}))


def test_validation_takes_the_plain_one_whatever_wraps_training() -> None:
    from titan_prores.components.transform.compile import Compile

    wrapping = SimpleNamespace(phase=1, wrap_loss=lambda loss: smoothed, wrap_validation_loss=lambda loss: loss)
    compiled = Compile(Compile.Config(backend="eager"))
    transforms = Transforms([("smoothing", wrapping), ("compile", compiled)])
    logits, labels = example()
    training, validation = transforms.wrap_loss(cross_entropy), transforms.wrap_validation_loss(cross_entropy)
    assert training(logits, labels).item() == pytest.approx(smoothed(logits, labels).item(), rel=1e-6)
    assert validation(logits, labels).item() == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_terms_of_a_compiled_loss(backend: str) -> None:
    from titan_prores.components.transform.compile import Compile

    compiled = Compile(Compile.Config(backend=backend)).wrap_loss(as_terms_smoothed)
    logits, labels = example()
    gradients = []
    for loss in (as_terms_smoothed, compiled):
        given = logits.clone().requires_grad_()
        found = loss(given, labels)
        assert isinstance(found, LossTerms) and list(found.others) == ["smoothing"]
        found.total.backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)
