"""One look at a machine with CUDA devices: is the arithmetic right, how fast is it, what fits. See --help."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_prores.output.shell import environment_of_children, run_command

if TYPE_CHECKING:
    import torch

    from titan_prores.tools.measure import Bench

CONFIG = Path(__file__).parents[1] / "train_configs" / "benchmark.toml"
REQUIRED = ("torch", "numpy", "pydantic", "rich", "tiktoken", "filelock", "psutil", "tomli_w")
SECONDS = 480  # of the whole command
SPARE_SECONDS = 15  # a part that would get less is not begun

OFF = ["--transforms.prores.enabled=false"]
COMPILED = ["--transforms.compile.enabled=true"]

# Flavors: two whose speed is measured, and those to try for the largest that fits, largest first. The batch is halved
# until it fits. The tiny ones make every line of this file run where there is no CUDA.
PLANS: dict[str, dict[str, Any]] = {
    "cuda": {
        "speed": ("130M", "1.3B"),
        "largest": ("7B", "3B", "1.3B", "350M", "130M"),
        "pairs": 16,
        "shape": ["--model.vocab_size=32000", "--training.seq_len=1024"],
        "batch": 16,
        "matmul": 8192,
    },
    "cpu": {
        "speed": ("debug", "debug"),
        "largest": ("7B", "debug"),
        "pairs": 6,
        "shape": ["--model.vocab_size=512", "--training.seq_len=32", "--transforms.compile.backend=eager"],
        "batch": 2,
        "matmul": 128,
    },
}

# Relative to a gradient's norm, fp32. Sums in another order differ by about 1e-6; a wrong one by far more.
TOLERANCE = 1e-4
PARITY = [
    "--model.flavor=debug",
    "--model.vocab_size=512",
    "--training.mixed_precision_param=float32",
    "--training.seq_len=64",
    "--training.global_batch_size=8",
    "--model.norm=sandwich",
    # In step 2, whose gradients are compared, weights are still the initial ones and alpha is between 0 and 1.
    "--transforms.prores.residual_schedule.T=2",
]


@dataclass
class Check:
    """What a part is given, in a process (or several) of its own.

    Attributes:
        device: "cuda" or "cpu".
        folder: shared by all parts of one command.
        report: file that lines of the result are appended to.
    """

    device: str
    folder: Path
    report: Path
    built: int = 0

    @property
    def plan(self) -> dict[str, Any]:
        return PLANS[self.device]

    def say(self, what: str, result: str, status: str = "ok", **numbers: Any) -> None:
        """Add a line to the result; rank 0 alone does."""
        if os.environ.get("RANK", "0") == "0":
            line = {"what": what, "result": result, "status": status, **numbers}
            with self.report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def bench(self, overrides: Sequence[str]) -> Bench:
        """A run of the benchmark recipe on the ranks of this part."""
        from titan_prores.distributed.mesh import World
        from titan_prores.tools.measure import Bench, load

        world = World.from_environment()
        self.built += 1
        own = [
            f"--job.dump_folder={self.folder}/{self.report.stem}-{self.built}",
            f"--job.device={self.device}",
            f"--dataset.cache_folder={self.folder}/tokens",
            *overrides,
        ]
        return Bench(load(CONFIG, own, world.size), world)


# --- Parts: is it right -------------------------------------------------------------------------------------------


def second_gradients(bench: Bench) -> dict[str, torch.Tensor]:
    """Gradients of step 2, whole and by name, on the CPU; the loss among them under the empty name."""
    import torch

    bench.step()
    found = bench.gradients()
    return {"": torch.tensor(bench.row.get("loss", 0.0), dtype=torch.float64), **found}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest distance relative to the expected norm, and whose it is; infinite for one that is zero or missing."""
    if found.keys() != expected.keys():
        return float("inf"), f"{sorted(found.keys() ^ expected.keys())[0]}, which only one of the two has"
    worst, whose = 0.0, ""
    for name, wanted in expected.items():
        norm, distance = float(wanted.norm()), float((found[name] - wanted).norm())
        relative = distance / norm if norm else (0.0 if distance == 0 else float("inf"))
        if (norm and not float(found[name].norm())) or math.isnan(relative):
            relative = float("inf")
        if relative > worst:
            worst, whose = relative, name or "the loss"
    return worst, whose


def near(check: Check, what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Say whether all gradients lie within the tolerance."""
    worst, whose = difference(found, expected)
    status = "ok" if worst <= TOLERANCE else "failed"
    result = f"largest relative difference {worst:.1e}, of {whose or 'none'}; allowed {TOLERANCE:.0e}"
    check.say(what, result, status, difference=worst)


def same_bits(check: Check, what: str, found: dict, expected: dict, again: dict) -> None:
    """Say whether two runs agree to the bit, where the reference agrees with itself."""
    import torch

    def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)

    if equal(found, expected):
        check.say(what, "loss and all gradients bitwise equal")
    elif equal(again, expected):
        worst, whose = difference(found, expected)
        check.say(what, f"not bitwise equal: relative difference {worst:.1e}, of {whose}", "failed", difference=worst)
    else:
        near(check, f"{what} (the reference itself is not repeatable here, so not by bits)", found, expected)


def one_process(check: Check) -> None:
    """eager against compiled, activation checkpointing on and off, ProRes at alpha 1, FSDP2 on one rank"""
    import torch

    alone = [*PARITY, "--training.local_batch_size=8", "--parallelism.fsdp.enabled=false"]

    def gradients(*overrides: str) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        return second_gradients(check.bench([*alone, *deterministic, *overrides]))

    deterministic = ["--training.deterministic=true"]
    try:
        reference = gradients()
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        check.say("deterministic kernels", " ".join(str(error).split())[:200], "failed")
        torch.use_deterministic_algorithms(False)
        deterministic.clear()
        reference = gradients()
    again = gradients()
    torch.save(reference, check.folder / "reference.pt")
    for mode in ("full", "selective"):
        found = gradients(f"--transforms.activation_checkpoint.mode={mode}")
        same_bits(check, f"activation checkpointing {mode} = none", found, reference, again)
    plain, ones = gradients(*OFF), gradients("--transforms.prores.residual_schedule.T=1e-6")
    same_bits(check, "ProRes at alpha 1 = without ProRes", ones, plain, gradients(*OFF))
    worst, whose = difference(reference, plain)
    status = "ok" if worst > TOLERANCE else "failed"
    check.say("control: alpha below 1 is told from alpha 1", f"relative difference {worst:.1e}, of {whose}", status)
    near(check, "FSDP2 on one rank = without", gradients("--parallelism.fsdp.enabled=true"), reference)
    compiled = gradients(*COMPILED)
    near(check, "compiled = eager", compiled, reference)


def several(check: Check, what: str, overrides: Sequence[str], data_ranks: int) -> None:
    import torch

    bench = check.bench([*PARITY, f"--training.local_batch_size={8 // data_ranks}", *overrides])
    found = second_gradients(bench)
    if bench.trainer.mesh.is_main:
        reference = torch.load(check.folder / "reference.pt", weights_only=True)
        near(check, f"{what} = one process", found, reference)


def fsdp2(check: Check) -> None:
    """FSDP2 over several ranks against one process"""
    ranks = int(os.environ["WORLD_SIZE"])
    several(check, f"FSDP2 on {ranks} ranks", [], ranks)


def tensor_parallel(check: Check) -> None:
    """tensor parallelism, with FSDP2 where there are four ranks or more, against one process"""
    ranks = int(os.environ["WORLD_SIZE"])
    what = f"FSDP2 x TP on {ranks // 2} x 2 ranks" if ranks > 2 else "TP on 2 ranks"
    several(check, what, ["--parallelism.tensor_parallel_degree=2"], ranks // 2)


# --- Parts: how fast is it ----------------------------------------------------------------------------------------


def float8_matmul(check: Check) -> None:
    """float8 against bf16 matmul, without torchao"""
    import torch

    from titan_prores.tools.measure import by_turns, paired_ratio
    from titan_prores.training.throughput import has_float8_matmul

    if check.device == "cuda" and not has_float8_matmul(torch.device("cuda", 0)):
        return check.say("float8 matmul", "this device has no float8 units", "skipped")
    size, device = check.plan["matmul"], torch.device(check.device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        return (x / scale).to(torch.float8_e4m3fn), scale

    (a8, scale_a), (b8, scale_b) = quantise(a), quantise(b)
    a16, b16, columns = a.bfloat16(), b.bfloat16(), b8.t().contiguous().t()

    def float8() -> torch.Tensor:
        return torch._scaled_mm(a8, columns, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)

    def timed(matmul: Callable[[], torch.Tensor], calls: int = 20) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            matmul()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    exact = (a8.float() * scale_a) @ (b8.float() * scale_b)
    error = float((float8().float() - exact).norm() / exact.norm())
    status = "ok" if error <= 1e-2 else "failed"  # rounding to bf16 is 2e-3, accumulating in fewer bits adds to it
    check.say("float8 matmul = its float8 operands in fp32", f"relative error {error:.1e}; allowed 1e-02", status)
    steps = {"float8": lambda: timed(float8), "bf16": lambda: timed(lambda: a16 @ b16)}
    seconds = by_turns({**steps, "again": steps["bf16"]}, 10)
    ratio, same = (paired_ratio(seconds[name], seconds["bf16"]) for name in ("float8", "again"))
    tera = {name: 2 * size**3 / sorted(taken)[len(taken) // 2] / 1e12 for name, taken in seconds.items()}
    rates = f"{tera['float8']:.3g} and {tera['bf16']:.3g} TFLOP/s"
    check.say(f"float8 / bf16 matmul of {size}: time", f"{ratio}, A/A {same}; {rates}")


def out_of_memory(error: BaseException | str) -> bool:
    """Whether it says that a device's memory was too small."""
    return "out of memory" in str(error).lower()


def fitting(check: Check, overrides: Sequence[str], smallest: int = 1) -> tuple[Bench, int] | None:
    """A run that has taken steps with the largest batch that fits, halved from the plan's; None where none does.

    With several ranks the first batch has to fit: ranks that ran out of memory cannot be told to meet again.
    """
    import torch

    size = check.plan["batch"]
    while size >= smallest:
        try:
            bench = check.bench([*check.plan["shape"], *COMPILED, *overrides, f"--training.local_batch_size={size}"])
            for _ in range(3):
                bench.step()
            return bench, size
        except RuntimeError as error:
            if not out_of_memory(error) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise
        bench = None
        release()
        torch._dynamo.reset()
        size //= 2
    return None


def release() -> None:
    """Return unused memory of earlier runs to the device."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_speed(check: Check, what: str, bench: Bench, size: int) -> None:
    """Tokens/s, MFU and peak memory of a run that is warm."""
    import statistics

    import torch

    from titan_prores.tools.measure import peak_bytes
    from titan_prores.training import throughput

    trainer = bench.trainer
    device = trainer.mesh.device
    speed = bench.tokens_per_step / statistics.median(bench.step() for _ in range(6))
    peak = throughput.peak_flops(device)
    if peak is None:
        share = "MFU not known: no peak FLOP/s for this device"
        used = None
    else:
        used = throughput.mfu(speed, trainer.model.flops_per_token(), trainer.mesh.size, peak)
        share = f"MFU {used:.1%}"
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    most = held + peak_bytes(bench.step, device)
    memory = f"peak {most / 2**30:.2f} GiB a device" + ("" if held else " beyond weights and optimizer")
    batch = f"{size} x {trainer.recipe.training.seq_len} tokens a device"
    check.say(
        what, f"{speed:,.0f} tokens/s, {share}, {memory}, {batch}", tokens_per_second=speed, mfu=used, peak_bytes=most
    )


def speed(check: Check, flavor: str) -> None:
    """Speed of one size, then ProRes on against off at that size."""
    from titan_prores.tools.measure import compare

    found = fitting(check, [f"--model.flavor={flavor}"])
    what = f"{flavor}, ProRes, compiled, bf16"
    if found is None:
        return check.say(what, "does not fit", "skipped")
    describe_speed(check, what, *found)
    size, found = found[1], None
    release()
    # Half the batch: there will be three runs.
    own = [
        *check.plan["shape"],
        *COMPILED,
        f"--model.flavor={flavor}",
        f"--training.local_batch_size={max(1, size // 2)}",
    ]
    what = f"{flavor}, ProRes on / off, compiled: time"
    try:
        both = compare(check.bench, [*own, *OFF], {"on": own}, check.plan["pairs"])
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return check.say(what, "three runs side by side do not fit", "skipped")
    check.say(what, f"{both.ratios['on']}, A/A {both.same}", ratio=both.ratios["on"].median)


def speed_small(check: Check) -> None:
    """tokens/s, MFU and peak memory of 130M, and ProRes on against off"""
    speed(check, check.plan["speed"][0])


def speed_medium(check: Check) -> None:
    """tokens/s, MFU and peak memory of 1.3B, and ProRes on against off"""
    speed(check, check.plan["speed"][1])


def float8_training(check: Check) -> None:
    """training with float8 linears against bf16"""
    import torch

    from titan_prores.config import registry
    from titan_prores.tools.measure import compare
    from titan_prores.training.throughput import has_float8_matmul

    what = "float8 training"
    if "float8" not in registry.names("transform"):
        return check.say(what, "there is no transform float8", "skipped")
    try:
        import torchao  # noqa: F401
    except ImportError as error:
        return check.say(what, f"torchao cannot be imported: {error}", "skipped")
    if check.device == "cuda" and not has_float8_matmul(torch.device("cuda", 0)):
        return check.say(what, "this device has no float8 units", "skipped")
    flavor = check.plan["speed"][1]
    own = [
        *check.plan["shape"],
        *COMPILED,
        f"--model.flavor={flavor}",
        f"--training.local_batch_size={max(1, check.plan['batch'] // 2)}",
    ]
    found = compare(
        check.bench, own, {"float8": [*own, "--transforms.float8.recipe_name=tensorwise"]}, check.plan["pairs"]
    )
    kind = "float8 tensorwise" if check.device == "cuda" else "emulated float8 tensorwise"
    check.say(f"{flavor}, {kind} / bf16, compiled: time", f"{found.ratios['float8']}, A/A {found.same}")


def largest(check: Check) -> None:
    """the largest size that fits: its tokens/s, MFU and peak memory"""
    import torch

    from titan_prores.build import build_components
    from titan_prores.config.layout import plan_mesh
    from titan_prores.tools.measure import load

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    total = torch.cuda.mem_get_info()[1] if check.device == "cuda" else 2**31
    for flavor in check.plan["largest"]:
        overrides = [f"--model.flavor={flavor}", "--transforms.activation_checkpoint.mode=full"]
        recipe = load(CONFIG, [*check.plan["shape"], *overrides], ranks)
        model = build_components(recipe, plan_mesh(recipe.parallelism, ranks)).model
        # Weights, gradients and two moments of AdamW, each in fp32, spread over the ranks.
        state_bytes = 16 * sum(p.numel() for p in model.parameters()) / ranks
        if state_bytes > 0.9 * total:
            check.say(f"{flavor}", f"state of {state_bytes / 2**30:.0f} GiB a device does not fit", "skipped")
            continue
        found = fitting(check, overrides)
        if found is not None:
            return describe_speed(check, f"largest that fits: {flavor}, ProRes, compiled, full AC, bf16", *found)
        check.say(f"{flavor}", "out of memory with a batch of 1", "skipped")
    return None


# --- The command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        function: what runs, on each rank.
        ranks: from the number of devices to the number of processes; 0 = this part is for more devices.
        seconds: the longest it may take.
    """

    function: Callable[[Check], None]
    ranks: Callable[[int], int]
    seconds: int


def _power(n_devices: int) -> int:
    """The most ranks, up to 8, that the batch of the parity parts can be spread over."""
    return max(n for n in (1, 2, 4, 8) if n <= n_devices)


PARTS = {
    "parity": Part(one_process, lambda n: 1, 150),
    "parity-fsdp2": Part(fsdp2, lambda n: _power(n) if n > 1 else 0, 60),
    "parity-tensor-parallel": Part(tensor_parallel, lambda n: _power(n) if n > 1 else 0, 60),
    "speed-small": Part(speed_small, lambda n: n, 120),
    "float8-matmul": Part(float8_matmul, lambda n: 1, 60),
    "speed-medium": Part(speed_medium, lambda n: n, 150),
    "float8-training": Part(float8_training, lambda n: n, 120),
    "largest": Part(largest, lambda n: n, 150),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parts = "\n".join(f"  {name:<24} {part.function.__doc__}" for name, part in PARTS.items())
    made = argparse.ArgumentParser(
        prog="titan-prores gpu-check",
        description="Look at this machine's CUDA devices: parity of layouts and transforms, float8, speed, memory.\n"
        "What is missing or out of time is skipped and said. Exit status: 0 nothing failed, 1 something did, 2 the\n"
        "check cannot run here.",
        epilog=f"parts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--device", choices=tuple(PLANS), default="cuda", help="cpu = tiny sizes, to try this script out")
    made.add_argument("--seconds", type=int, default=SECONDS, help=f"time for everything ({SECONDS})")
    made.add_argument(
        "--only", action="append", metavar="PART", choices=tuple(PARTS), help="may be given several times"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    # How the command calls itself for a part, in processes of their own.
    made.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(name.replace("_", "-") for name in missing)
        return refuse(f"these packages are missing: {names} (pip install {names})")
    if options.json and not options.json.resolve().parent.is_dir():
        return refuse(f"--json {options.json}: there is no such folder")
    import torch

    if options.part:
        return run_part(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        return refuse(
            f"no CUDA device is available to torch {torch.__version__}; --device cpu tries this script with tiny sizes"
        )
    # So that parts, which lead sessions of their own, end with this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    n_devices = torch.cuda.device_count() if options.device == "cuda" else 2
    deadline = time.time() + options.seconds
    lines = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        for name in [name for name in PARTS if not options.only or name in options.only]:
            lines += launch(name, options.device, n_devices, Path(folder), deadline)
    return conclude(lines, about(options.device, n_devices), options.json)


def refuse(problem: str) -> int:
    """Say why the check cannot run here; the exit status."""
    print(f"error: {problem}", file=sys.stderr)
    return 2


def launch(name: str, device: str, n_devices: int, folder: Path, deadline: float) -> list[dict[str, Any]]:
    """Run one part in processes of its own, which are killed at its deadline; returns its lines."""
    part = PARTS[name]
    ranks = part.ranks(n_devices)
    if not ranks:
        return [{"what": name, "result": "needs two devices or more", "status": "skipped"}]
    if deadline - time.time() < SPARE_SECONDS:
        return [{"what": name, "result": "out of time", "status": "skipped"}]
    if name.startswith("parity-") and not (folder / "reference.pt").exists():
        return [{"what": name, "result": "the part parity left nothing to compare with", "status": "skipped"}]
    deadline = min(deadline, time.time() + part.seconds)
    command = ["-m", "titan_prores", "gpu-check", "--part", name, "--device", device, "--folder", str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {
        **environment_of_children(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it no deterministic matmul
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    }
    print(f"{name}: {part.function.__doc__}", file=sys.stderr, flush=True)
    start = time.time()
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=deadline - time.time())
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
    report = folder / f"{name}.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if status is None:
        lines.append({"what": name, "result": f"out of time after {time.time() - start:.0f} s", "status": "skipped"})
    elif status:
        why = reason(log.read_text())
        # Among several ranks one that runs out of memory takes the others along.
        short = ranks > 1 and out_of_memory(why)
        lines.append({"what": name, "result": why, "status": "skipped" if short else "failed"})
    elif not lines:
        lines.append({"what": name, "result": "ended without a result", "status": "failed"})
    print(f"  {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    return lines


def end(process: subprocess.Popen) -> None:
    """Kill what is left of a part, torchrun's ranks included, which lead sessions of their own."""
    import psutil

    try:
        left = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        left = []
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason(log: str) -> str:
    """The line of a log that says most: its last error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1][:300]


def run_part(options: argparse.Namespace) -> int:
    """What a process of a part does."""
    from titan_prores.distributed import mesh

    # The driver and its backend may have much to say; the result is in the file.
    logging.disable(logging.INFO)
    report = options.folder / f"{options.part}.jsonl"
    PARTS[options.part].function(Check(options.device, options.folder, report))
    mesh.stop()
    return 0


def about(device: str, n_devices: int) -> dict[str, Any]:
    """Devices and versions."""
    import torch

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU, tiny sizes: a trial of this script, no result"
    packages = {package: version(package) for package in ("torch", "torchao", "torchdata", "triton")}
    return {"device": name, "n_devices": n_devices if device == "cuda" else 0, "packages": packages}


def conclude(lines: list[dict[str, Any]], surroundings: dict[str, Any], json_file: Path | None) -> int:
    """Print the table, write the file; the exit status."""
    from titan_prores.output import tables

    counts = {status: sum(line["status"] == status for line in lines) for status in ("ok", "failed", "skipped")}
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in surroundings["packages"].items())
    several = f"{surroundings['n_devices']} x " if surroundings["n_devices"] > 1 else ""
    tables.show(
        f"{several}{surroundings['device']}; {versions}",
        ["what", "result", "status"],
        [[line["what"], line["result"], line["status"]] for line in lines],
    )
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if json_file:
        json_file.write_text(json.dumps({"about": surroundings, "lines": lines}, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
