"""Who may import whom (docs/design.md). Walks the import statements, those inside functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dflash_cache"

LEVELS = [
    {"errors", "signals"},
    {"spec"},
    {"config"},
    {"format"},
    {"device", "target_head", "corpus", "stream", "drafter"},
    {"extract", "train", "export", "evaluate", "report", "demo"},
    {"cli", "schemas"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}

# Pieces that never meet, whatever their level.
STRANGERS = {
    "extract": {"train", "stream", "drafter"},
    "train": {"extract", "corpus"},
    "stream": {"extract", "train", "corpus"},
    "drafter": {"format", "stream", "corpus", "target_head"},
    "corpus": {"stream", "drafter", "target_head"},
}

# Third-party packages and the only parts that may import them.
RESERVED = {
    "torch": {"device", "target_head", "stream", "drafter", "extract", "train", "export", "evaluate", "report", "demo"},
    "transformers": {"extract", "corpus", "export", "evaluate", "demo"},
    "zarr": {"format"},
    "typer": {"cli"},
    "rich": {"cli"},
}


def modules() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "cli").glob("*.py"), *(ROOT / "schemas").glob("*.py")])


def part_of(path: Path) -> str:
    """The name of the part that a module belongs to: its sub-package, or its own name."""
    relative = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT)
    return relative.parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which part they name"
            yield node.module or ""
            if node.module == "dflash_cache":
                yield from (f"dflash_cache.{alias.name}" for alias in node.names if not alias.name.startswith("__"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    part = part_of(path)
    for name in imported(path):
        head, _, rest = name.partition(".")
        if head != "dflash_cache":
            allowed = RESERVED.get(head)
            assert allowed is None or part in allowed, f"{part} may not import {head}"
            continue
        other = rest.partition(".")[0]
        if other in ("", part) or part == "__init__":
            continue
        assert other in LEVEL, f"{other} has no level: add it to this test and to docs/design.md"
        assert LEVEL[other] <= LEVEL[part], f"{part} imports {other}, which lies above it"
        assert other not in STRANGERS.get(part, set()), f"{part} never imports {other}"


def test_every_part_has_a_level() -> None:
    parts = {part_of(path) for path in modules()} - {"__init__"}
    assert parts == set(LEVEL)


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["extract", "--help"], ["train", "--help"], ["estimate", "--help"], ["inspect", "--help"]]
)
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    loaded = run_python(
        f"import sys; sys.argv = ['dflash-cache', *{arguments!r}]\n"
        "from dflash_cache.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'zarr') if name in sys.modules])"
    )
    assert loaded.splitlines()[-1] == "[]"


@pytest.mark.parametrize("part", ["format", "format.cache", "format.writer", "format.verify"])
def test_the_format_does_not_load_torch(part: str) -> None:
    assert run_python(f"import sys, dflash_cache.{part}; print('torch' in sys.modules)").strip() == "False"


def test_training_does_not_load_transformers() -> None:
    assert run_python("import sys, dflash_cache.train.loop; print('transformers' in sys.modules)").strip() == "False"
