"""Components of one's own, by all the ways there are, and what stands in their way."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError
from titan_prores.config.resolve import Resolver
from titan_prores.config.sections import Section

ROOT = Path(__file__).resolve().parents[3]

SCHEDULE = '''
from titan_prores import register, Section, setting

@register("lr_scheduler", "{name}")
class {cls}:
    """Half of the peak."""

    class Config(Section):
        share: float = setting(0.5, "of the peak", gt=0)

    def __init__(self, config, *, total_steps):
        self.config = config

    def factor(self, step):
        return self.config.share
'''


@pytest.fixture
def clean():
    """Take back what a test registers."""
    before = {kind: dict(table) for kind, table in registry._table.items()}
    registry.names("lr_scheduler")  # built-ins stay
    before["lr_scheduler"] = dict(registry._table["lr_scheduler"])
    yield
    for kind, table in before.items():
        registry._table[kind].clear()
        registry._table[kind].update(table)


def run(code: str, *paths: Path, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_file(tmp_path, clean):
    (tmp_path / "mine.py").write_text(SCHEDULE.format(name="half", cls="Half"))
    registry.load_plugin("./mine.py", tmp_path)
    registry.load_plugin(str(tmp_path / "mine.py"), None)  # the same file again
    assert registry.lookup("lr_scheduler", "half").__doc__ == "Half of the peak."
    assert "half" in registry.names("lr_scheduler") and "wsd" in registry.names("lr_scheduler")
    resolver = Resolver(sources.Tree())
    spec = resolver.component("lr_scheduler", {"name": "half", "share": 1}, ("lr_scheduler",))
    assert resolver.errors == [] and spec.build(total_steps=3).factor(0) == 1.0


def test_a_file_that_failed_can_be_tried_again(tmp_path, clean):
    file = tmp_path / "later.py"
    file.write_text(SCHEDULE.format(name="later", cls="Later") + "\n1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        registry.load_plugin("./later.py", tmp_path)
    file.write_text(SCHEDULE.format(name="later", cls="Later") + "\n# mended, and of another length")
    registry.load_plugin("./later.py", tmp_path)
    assert registry.summary(registry.lookup("lr_scheduler", "later")) == "Half of the peak."


def test_a_module_and_a_reference(tmp_path, clean, monkeypatch):
    package = tmp_path / "my_parts"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "half.py").write_text(SCHEDULE.format(name="module_half", cls="Half"))
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_plugin("my_parts.half", tmp_path)
    assert registry.lookup("lr_scheduler", "module_half") is registry.lookup("lr_scheduler", "my_parts.half:Half")
    with pytest.raises(ConfigError, match=r"my_parts.half has no Hafl; did you mean Half\?"):
        registry.lookup("lr_scheduler", "my_parts.half:Hafl")
    with pytest.raises(ConfigError, match="is not a valid model component: Half lacks init_rules, fill_buffers, "):
        registry.lookup("model", "my_parts.half:Half")


def distribution(folder: Path, name: str, target: str) -> Path:
    """What pip leaves of an installed distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[titan_prores.components]\nparts = {target}\n")
    return folder


RECIPE = '[training]\nsteps = 4\n[lr_scheduler]\nname = "installed_half"\n'


def test_an_installed_distribution(tmp_path):
    site = distribution(tmp_path / "site", "half-parts", "half_parts")
    (site / "half_parts.py").write_text(SCHEDULE.format(name="installed_half", cls="Half"))
    code = """
    from titan_prores.config import registry
    print(registry.names("lr_scheduler"), registry.summary(registry.lookup("lr_scheduler", "installed_half")))
    """
    done = run(code, site, ROOT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['constant', 'cosine', 'installed_half', 'linear', 'wsd'] Half of the peak.\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("1 / 0", "entry point parts = 'broken_parts': cannot be loaded: ZeroDivisionError: division by zero"),
        (
            SCHEDULE.format(name="wsd", cls="Mine"),
            "lr_scheduler.wsd: broken_parts.Mine cannot be registered under a name that "
            "titan_prores.components.lr_scheduler.warmup_decay.WarmupStableDecay already has",
        ),
    ],
)
def test_a_distribution_that_is_in_the_way(tmp_path, source, problem):
    site = distribution(tmp_path / "site", "broken-parts", "broken_parts")
    (site / "broken_parts.py").write_text(source)
    code = """
    import sys
    from titan_prores import cli
    sys.exit(cli.main(["--list-components", "lr_scheduler"]))
    """
    done = run(code, site, ROOT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: installed distribution broken-parts: {problem}\n"


def test_another_package_called_components_is_no_concern_of_ours(tmp_path):
    (tmp_path / "components").mkdir()
    (tmp_path / "components" / "__init__.py").touch()
    code = """
    import sys, components
    from titan_prores import cli
    sys.exit(cli.main(["--list-components", "loss"]))
    """
    done = run(code, tmp_path, ROOT, cwd=tmp_path)
    assert done.returncode == 0 and "cross_entropy" in done.stdout


def test_a_second_copy_of_a_built_in_component_is_refused(tmp_path):
    """As `import components` from the root of a checkout would make it."""
    code = "import components.loss.cross_entropy"
    done = run(code, ROOT, cwd=tmp_path)
    assert "imported a second time under another name" in done.stderr
    assert "titan_prores.components.loss.cross_entropy" in done.stderr


def test_names_are_taken_once(clean, tmp_path):
    (tmp_path / "twice.py").write_text(SCHEDULE.format(name="twice", cls="A") + SCHEDULE.format(name="twice", cls="B"))
    with pytest.raises(ConfigError, match=r"lr_scheduler.twice: .*\.B cannot be .* that .*\.A already has"):
        registry.load_plugin("./twice.py", tmp_path)
    (tmp_path / "same.py").write_text(SCHEDULE.format(name="same", cls="A") * 2)
    with pytest.raises(ConfigError, match=r"lr_scheduler.same: .*\.A cannot be .* that .*\.A already has"):
        registry.load_plugin("./same.py", tmp_path)
    (tmp_path / "wsd.py").write_text(SCHEDULE.format(name="wsd", cls="Mine"))
    with pytest.raises(ConfigError, match=r"lr_scheduler.wsd: .*\.Mine cannot be .*WarmupStableDecay already has"):
        registry.load_plugin("./wsd.py", tmp_path)


def test_what_cannot_be_registered(clean):
    class NoConfig:
        def factor(self, step): ...

    class PlainConfig(NoConfig):
        class Config: ...

    class NoCall:
        class Config(Section): ...

    with pytest.raises(ConfigError, match=r"lr_scheduler.x: is not a valid .* component: .*NoConfig lacks Config"):
        registry.register("lr_scheduler", "x")(NoConfig)
    with pytest.raises(
        ConfigError, match=r"PlainConfig has a Config that does not derive from titan_prores.config.sections.Section"
    ):
        registry.register("lr_scheduler", "x")(PlainConfig)
    with pytest.raises(ConfigError, match="lacks __call__"):
        registry.register("loss", "x")(NoCall)
    with pytest.raises(ConfigError, match="is not a class"):
        registry.register("loss", "x")(len)
    with pytest.raises(ConfigError, match=r"lr_schedule': unknown kind of component .* did you mean lr_scheduler"):
        registry.register("lr_schedule", "x")
    for name in ("", "a:b", 3):
        with pytest.raises(ConfigError, match="cannot be registered under this name"):
            registry.register("lr_scheduler", name)


def test_lookup_says_what_there_is():
    with pytest.raises(ConfigError) as caught:
        registry.lookup("lr_scheduler", "cosin")
    assert caught.value.nearest == "cosine" and caught.value.allowed == registry.names("lr_scheduler")
