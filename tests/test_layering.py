"""Imports go one way: configs | fusions <- models <- trainer <- scripts; and the cheap modules stay free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

ALLOWED = {
    "configs": {"configs"},
    "fusions": {"fusions"},
    "models": {"configs", "fusions", "models"},
    "trainer": {"configs", "fusions", "models", "trainer"},
    "scripts": {"configs", "fusions", "models", "trainer", "scripts"},
}
FILES = [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    home = path.relative_to(ROOT).parts[0]
    assert (imported(path) & set(ALLOWED)) <= ALLOWED[home]
    if home == "fusions":
        own = {"triton"} if path.parent.name == "triton" else set()
        assert imported(path) <= set(sys.stdlib_module_names) | {"fusions", "torch", "numpy"} | own


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long"


@pytest.mark.parametrize(
    "module",
    [
        "configs.load",
        "fusions.catalogue",
        "models.fusion_sites",
        "scripts.explain",
        "trainer.auto",
        "trainer.compare",
        "trainer.compare.report",
        "scripts.compare",
    ],
)
def test_no_torch_is_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_paths_that_the_readme_names_exist() -> None:
    import re

    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:configs|fusions|models|trainer|scripts|tests)/[\w./-]+\.(?:py|yaml|sh|json))`", text))
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = ("configs", "fusions", "models", "trainer", "scripts")
    found = [path.parent.relative_to(ROOT) for root in roots for path in (ROOT / root).rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in found)
