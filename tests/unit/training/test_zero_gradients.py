"""A run that learns nothing says so, once."""

from types import SimpleNamespace

import pytest

from titan_prores.training.metrics_hub import MetricsHub


@pytest.fixture
def warned(logged):
    """Gradient norms of steps 1, 2 ... to what a run's rows make it say."""

    def feed(norms):
        hub = MetricsHub([], SimpleNamespace(metrics=SimpleNamespace(log_freq=1)), SimpleNamespace(is_main=True))
        for step, norm in enumerate(norms, 1):
            hub.write_step({"step": step, "loss": 5.549076, "grad_norm": norm}, [], {})
        return logged

    return feed


def test_zero_gradients_in_a_row_are_said_once(warned):
    [message] = warned([0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0])
    assert message.startswith(
        "warning: the gradient norm is exactly 0 in steps 2 to 4, loss 5.5491: nothing is being learned"
    )


@pytest.mark.parametrize("norms", [[0.0, 0.0, 1e-30, 0.0, 0.0], [0.0, 0.0, float("nan"), 0.0, 0.0], [1.0] * 5])
def test_others_are_not(norms, warned):
    assert warned(norms) == []
