"""Brings what an older lifetrace wrote into the present format, one version at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from lifetrace.errors import TraceError

from . import schema


@dataclass(frozen=True)
class Upgrade:
    """From one version to the next: what becomes of the manifest, and of a table by its name."""

    manifest: Callable[[dict[str, Any]], dict[str, Any]] = lambda meta: meta
    table: Callable[[str, pa.Table], pa.Table] = lambda name, rows: rows


# By the version that it starts from. Version 1 is the first, so there is none yet.
UPGRADES: dict[int, Upgrade] = {}


def manifest(meta: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a manifest of any version in the present format; `written_version` keeps the one it had.

    Raises:
        TraceError: it is of a newer version, or of one that no upgrade starts from.
    """
    version = meta["format_version"]
    if version > schema.FORMAT_VERSION:
        raise TraceError(
            f"{folder} was written in format {version}, this lifetrace reads up to "
            f"{schema.FORMAT_VERSION}. Update lifetrace to read it."
        )
    if version == schema.FORMAT_VERSION:
        return meta
    for step in _steps(version, folder):
        meta = step.manifest(meta)
    return meta | {"format_version": schema.FORMAT_VERSION, "written_version": version}


def table(name: str, rows: pa.Table, version: int, folder: Path) -> pa.Table:
    """Return a table that a lifetrace of this version wrote in the present format."""
    for step in _steps(version, folder):
        rows = step.table(name, rows)
    return rows


def _steps(version: int, folder: Path) -> list[Upgrade]:
    versions = range(version, schema.FORMAT_VERSION)
    if any(number not in UPGRADES for number in versions):
        raise TraceError(f"{folder} was written in format {version}, which this lifetrace does not read.")
    return [UPGRADES[number] for number in versions]
