"""The oldest versions that the package lets in are those that `make versions` tries."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_oldest_versions_that_are_let_in_are_the_ones_that_are_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    let_in = {
        name: _release(text)
        for name, text in (re.match(r"([\w-]+)>=([\d.]+)", d).groups() for d in project["dependencies"])
    }
    lines = (ROOT / "tests" / "versions" / "oldest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tried.pop("duckdb") in str(project["optional-dependencies"]["dev"])
    assert {name: _release(text) for name, text in tried.items()} == let_in


def _release(text):
    """`17` and `17.0.0` are the same release."""
    return tuple(int(part) for part in [*text.split("."), "0", "0"][:3])
