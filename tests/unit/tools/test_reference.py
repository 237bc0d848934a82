"""docs/reference says what the declarations say."""

from __future__ import annotations

from titan_prores.config import registry
from titan_prores.config.engine_sections import ENGINE_SECTIONS
from titan_prores.config.kinds import KINDS
from titan_prores.tools.reference import FOLDER, pages


def test_pages_are_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert written == pages(), "run python -m titan_prores.tools.reference"


def test_every_key_and_component_is_there() -> None:
    made = pages()
    for kind in KINDS:
        for name in registry.names(kind):
            if not registry.lookup(kind, name).__module__.startswith(registry.BUILTIN_PACKAGE):
                continue  # of another test
            section = made[f"{kind}.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
            for key in registry.lookup(kind, name).Config.model_fields:
                assert f"| `{key}` |" in section
    for name, section in ENGINE_SECTIONS.items():
        text = made["sections.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert all(f"| `{key}` |" in text for key in section.model_fields)


def test_tables_and_anchors() -> None:
    for name, text in pages().items():
        for line in text.splitlines():
            if line.startswith("|"):
                assert line.replace("\\|", "").count("|") == 5, f"{name}: {line}"
    assert "[`fix-sqrt-l`](residual_schedule.md#fix-sqrt-l-1)" in pages()["README.md"]
