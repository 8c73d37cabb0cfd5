"""The wheel holds what the tree holds: a sub-package missing from the explicit list is missing from the wheel only."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_of_the_tree_is_listed() -> None:
    found = {"dflash_cache.cli", "dflash_cache.schemas"}
    for path in (ROOT / "dflash_cache").rglob("*.py"):
        found.add(".".join(path.parent.relative_to(ROOT).parts))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_package_has_an_init() -> None:
    folders = {path.parent for path in (ROOT / "dflash_cache").rglob("*.py")} | {ROOT / "cli", ROOT / "schemas"}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_changelog_names_this_version() -> None:
    version = PYPROJECT["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_constraints_cover_every_dependency() -> None:
    """CI pins what users get as ranges; a dependency that is not pinned drifts."""
    project = PYPROJECT["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += [entry for entry in extra if not entry.startswith("dflash-cache")]
    names = {re.split(r"[<>=~!\[ ]", entry)[0].lower().replace("_", "-") for entry in requirements}
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names - pinned == set()
