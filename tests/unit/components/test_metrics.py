"""Sinks and probes of metrics: what is written can be read back, whole and right."""

import json
import math

import pytest
import torch
from torch import nn

from titan_prores.config import registry
from titan_prores.config.errors import ConfigError
from titan_prores.output.run_folder import RunFolder
from titan_prores.training.throughput import Throughput, memory_gib, mfu, peak_by_name, peak_flops

INFO = {
    "end_step": 40,
    "start_step": 0,
    "n_layers": 2,
    "log_freq": 10,
    "recipe": {"job": {"dump_folder": "x"}},
    "recipe_toml": 'job.dump_folder = "x"  # here\n',
}


def row(step, **more):
    return {
        "step": step,
        "loss": 5.0 + 1 / 3,
        "perplexity": math.exp(5),
        "grad_norm": 1.25,
        "lr": 3e-4,
        "alpha_min": 0.0,
        "alpha_max": 0.5,
        "tokens": step * 4096,
        "tokens_per_second": 12345.6,
        "step_seconds": 0.33,
        "memory_gib": 1.5,
        **more,
    }


def make(name, **settings):
    component = registry.lookup("metrics", name)
    return component(component.Config(**settings))


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path, is_main=True)


@pytest.mark.parametrize("name", registry.names("metrics"))
def test_every_component_goes_through_a_run(name, run, monkeypatch, tmp_path):
    if name == "wandb":
        pytest.importorskip("wandb")
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    metric = make(name, **({"mode": "disabled"} if name == "wandb" else {}))
    metric.start(run, INFO)
    metric.write({**row(1), **metric.measure(1, model)})
    metric.write({"step": 1, "validation": True, "validation_loss": 4.0, "validation_perplexity": math.exp(4)})
    metric.close()
    make(name, **({"mode": "disabled"} if name == "wandb" else {})).close()  # a run may end before it starts


def test_jsonl_keeps_every_bit_and_is_strict_json(run):
    metric = make("jsonl")
    metric.start(run, INFO)
    metric.write({"step": 1, "loss": 0.1 + 0.2, "alpha": [1 / 3, 1.0], "grad_norm": torch.tensor(1.5)})
    assert run.metrics_file.read_text().endswith("\n"), "a row is on disk as soon as it is written"
    metric.write({"step": 2, "loss": float("nan"), "alpha": [float("inf"), -float("inf")], "skipped": True})
    metric.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not valid JSON")

    first, second = [json.loads(line, parse_constant=refuse) for line in run.metrics_file.read_text().splitlines()]
    assert first == {"step": 1, "loss": 0.1 + 0.2, "alpha": [1 / 3, 1.0], "grad_norm": 1.5}
    assert second == {"step": 2, "loss": "NaN", "alpha": ["Infinity", "-Infinity"], "skipped": True}
    assert math.isnan(float(second["loss"])) and float(second["alpha"][1]) == -math.inf


def test_jsonl_appends_and_does_not_join_a_torn_line(run):
    run.metrics_file.write_text('{"step": 1}\n{"step": 2, "lo')
    metric = make("jsonl")
    metric.start(run, INFO)
    metric.write({"step": 2})
    metric.close()
    assert run.metrics_file.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 2}']


def test_console_lines(run, logged):
    metric = make("console")
    metric.start(run, INFO)
    for step in range(1, 24):
        metric.write(row(step, mfu=0.413))
        if step == 15:
            metric.write(
                {
                    "step": 15,
                    "validation": True,
                    "validation_loss": 4.0,
                    "validation_perplexity": 54.6,
                    "validation_tokens": 8192,
                }
            )
    metric.write(row(24, skipped=True, loss=float("nan"), perplexity=float("nan")))
    metric.write(row(25))
    metric.close()
    assert logged[0].split() == ["step", "loss", "ppl", "grad", "lr", "alpha", "tok/s", "mfu", "GiB", "left"]
    shown = [line.split()[0] for line in logged[1:]]
    assert shown == ["1/40", "10/40", "15/40", "validation", "20/40", "24/40", "25/40"]
    assert logged[2].split()[1:9] == ["5.3333", "148.41", "1.250", "3.00e-04", "0.00-0.50", "12.4k", "41.3%", "1.50"]
    assert "validation after step 15: loss 4.0000, perplexity 54.60 over 8,192 tokens" in logged
    assert logged[6].endswith("skipped")
    assert all(len(line) + len("12:34:56 ") <= 100 for line in logged)
    assert len({len(line) for line in (logged[0], logged[1], logged[2])}) == 1, "columns are aligned"


def test_console_leaves_out_what_a_run_does_not_have(run, logged):
    metric = make("console")
    metric.start(run, INFO)
    plain = row(1)
    del plain["alpha_min"], plain["alpha_max"]
    metric.write(plain)
    metric.close()
    assert "alpha" not in logged[0] and "mfu" not in logged[0]
    assert len(logged) == 2


def test_console_shows_a_bar_on_a_terminal(run, monkeypatch):
    import io

    from rich.console import Console

    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("titan_prores.components.metrics.console.console", lambda: terminal)
    metric = make("console")
    metric.start(run, INFO)
    metric.write(row(7))
    metric.close()
    drawn = terminal.file.getvalue()
    assert "7/40" in drawn and "loss 5.3333" in drawn and "tok/s 12.3k" in drawn


def test_tensorboard_scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metric = make("tensorboard")
    metric.start(run, INFO)
    for step in (1, 2, 3):
        metric.write(row(step, alpha=[0.25, 0.5]))
    metric.close()
    resumed = make("tensorboard")
    resumed.start(run, {**INFO, "start_step": 2})
    resumed.write(row(3, loss=1.0))
    resumed.close()

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("loss/train")] == [(1, 5.3333), (2, 5.3333), (3, 1.0)]
    assert events.Scalars("alpha/layer_02")[0].value == 0.5
    tags = set(events.Tags()["scalars"])
    assert tags == {
        "loss/train",
        "perplexity/train",
        "optimizer/grad_norm",
        "optimizer/lr",
        "alpha/min",
        "alpha/max",
        "alpha/layer_01",
        "alpha/layer_02",
        "throughput/tokens",
        "throughput/tokens_per_second",
        "throughput/step_seconds",
        "throughput/memory_gib",
    }


def test_tensorboard_groups_losses_and_keeps_the_recipe(run):
    """Read back with TensorBoard's own reader, after a stop and a resume."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2

    recipe = {
        "model": {"n_layers": 2, "norm": "pre"},
        "optimizer": {"lr": 1e-3},
        "parallelism": {"x": [1, 2], "on": True},
    }
    info = {**INFO, "recipe": recipe, "recipe_toml": "[model]\nn_layers = 2  # a.toml:3\n"}

    def train(first, last):
        metric = make("tensorboard")
        metric.start(run, {**info, "start_step": first - 1})
        for step in range(first, last + 1):
            metric.write(row(step, loss=10.0 - step / 10))
            if step % 10 == 0:
                validation = {"validation_loss": 4.0, "validation_perplexity": math.exp(4), "validation_tokens": 4096}
                metric.write({"step": step, "validation": True, **validation})
        metric.close()
        events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return events

    def sessions(events):
        data = [
            plugin_data_pb2.HParamsPluginData.FromString(raw) for raw in events.PluginTagToContent("hparams").values()
        ]
        return {each.WhichOneof("data"): getattr(each, each.WhichOneof("data")) for each in data}

    assert "session_end_info" not in sessions(train(1, 20)), "a run that stopped early did not succeed"
    events = train(21, 40)
    tags = events.Tags()
    assert {name for name in tags["scalars"] if name.startswith("loss/")} == {"loss/train", "loss/validation"}
    assert [e.step for e in events.Scalars("loss/train")] == list(range(1, 41))
    assert [(e.step, e.value) for e in events.Scalars("loss/validation")] == [(step, 4.0) for step in (10, 20, 30, 40)]
    assert "validation/tokens" in tags["scalars"] and "validation" not in tags["scalars"]
    assert all("/" in name for name in tags["scalars"])

    (text,) = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("recipe/text_summary")][-1:]
    assert "    [model]\n    n_layers = 2  # a.toml:3\n" in text
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert charts["loss"] == ["loss/(train|validation)"] and charts.keys() == {"loss", "perplexity"}

    found = sessions(events)
    values = {key: value.WhichOneof("kind") for key, value in found["session_start_info"].hparams.items()}
    assert values == {
        "model.n_layers": "number_value",
        "model.norm": "string_value",
        "optimizer.lr": "number_value",
        "parallelism.x": "string_value",
        "parallelism.on": "string_value",
    }
    assert found["session_start_info"].hparams["optimizer.lr"].number_value == 1e-3
    metrics = [info.name.tag for info in found["experiment"].metric_infos]
    assert "loss/validation" in metrics and set(metrics) <= set(tags["scalars"]), "their last values are shown"
    assert found["session_end_info"].status == 1, "success"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("loss", "loss/train"),
        ("validation_loss", "loss/validation"),
        ("perplexity", "perplexity/train"),
        ("validation_perplexity", "perplexity/validation"),
        ("validation_documents", "validation/documents"),
        ("z_loss", "loss/z"),
        ("lr", "optimizer/lr"),
        ("lr_embedding", "optimizer/lr_embedding"),
        ("grad_norm", "optimizer/grad_norm"),
        ("alpha_max", "alpha/max"),
        ("loss_spike_score", "spike_score/loss"),
        ("mfu", "throughput/mfu"),
        ("memory_gib", "throughput/memory_gib"),
        ("skipped", "training/skipped"),
        ("something_new", "training/something_new"),
    ],
)
def test_a_tag_is_grouped_by_rule(key, expected, run):
    from titan_prores.components.metrics._scalars import scalars

    assert dict(scalars({"step": 3, "validation": True, key: 2.0})) == {expected: 2.0}


WANDB_STUB = """
import types
calls = []
def init(**settings):
    calls.append(settings)
    run = types.SimpleNamespace(id=settings["id"] or f"id{len(calls)}", logged=[])
    run.log = lambda values, step: calls.append((step, values))
    run.finish = lambda: calls.append("finished")
    return run
"""


def test_wandb(run, tmp_path, monkeypatch):
    import importlib
    import sys

    (tmp_path / "wandb.py").write_text(WANDB_STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    metric = make("wandb", project="p", mode="offline")
    metric.start(run, INFO)
    metric.write({"step": 3, "loss": 2.0, "alpha": [0.5]})
    metric.write({"step": 3, "validation": True, "validation_loss": 3.0})
    metric.close()
    calls = importlib.import_module("wandb").calls
    assert calls[0]["project"] == "p" and calls[0]["mode"] == "offline" and calls[0]["config"] == INFO["recipe"]
    assert calls[1:] == [(3, {"loss/train": 2.0, "alpha/layer_01": 0.5}), (3, {"loss/validation": 3.0}), "finished"]
    make("wandb").start(run, {**INFO, "start_step": 3})
    assert calls[-1]["id"] == "id1", "a resumed run goes on in the same curves"
    make("wandb").start(run, INFO)
    assert calls[-1]["id"] is None
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def test_wandb_says_how_to_install_it(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a))
    with pytest.raises(ConfigError, match=r"pip install 'titan-prores\[wandb\]'"):
        make("wandb")


def test_layer_grad_norm():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1, bias=False)])
    for layer in model.layers:
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
    probe = make("layer_grad_norm", every_steps=5)
    assert probe.measure(4, model) == {}
    assert probe.measure(5, model)["layer_grad_norm"] == pytest.approx([2 * 9**0.5, 2 * 3**0.5])
    model.layers[1].weight.grad = None
    assert probe.measure(10, model)["layer_grad_norm"][1] == 0


def test_throughput_leaves_pauses_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    meter = Throughput(torch.device("cpu"), 1, 0)
    now[0] += 2
    with meter.paused():
        now[0] += 50
    found = meter.step(1000)
    assert (found["step_seconds"], found["tokens_per_second"]) == (2.0, 500.0)
    now[0] += 4
    found = meter.step(1000)
    assert (found["step_seconds"], found["tokens_per_second"]) == (4.0, 250.0), (
        "a pause counts for the step it fell into only"
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
    ],
)
def test_peak_by_name(name, peak):
    assert peak_by_name(name) == peak


def test_mfu_and_memory():
    assert mfu(1e6, 6e9, 8, 1e15) == pytest.approx(0.75)
    assert peak_flops(torch.device("cpu")) is None
    assert 0.01 < memory_gib(torch.device("cpu")) < 64
