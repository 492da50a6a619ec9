"""Configurations of models where a MODEL is taken: a config.json, or a folder that holds one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from stagec.jobs.session import Session
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.limits import MAX_CONFIGURATION
from stagec.support.source import Source

CONFIG = "config.json"


def is_configuration(model: str) -> bool:
    """Whether a MODEL is given by a configuration: a folder, or a name that ends in .json."""
    return model.endswith(".json") or Path(model).is_dir()


def configuration_name(model: str) -> str:
    """The name of a model that is given by a configuration: that of the file, or of the folder
    where the file is called config.json."""
    path = Path(model)
    if path.is_dir() or path.name == CONFIG:
        return (path if path.is_dir() else path.parent).resolve().name or "model"
    return path.stem


def import_configuration(
    path: str,
    session: Session,
    ignored: Collection[str] = (),
    plugins: Iterable[Path] = (),
    *,
    images: bool = False,
    unknown: bool = False,
) -> Source:
    """The STG text that a configuration becomes, with a name for diagnostics; '-' is stdin. Keys
    in `ignored` are taken as left out, and with `unknown` those that are not known, with a remark;
    with `images` its step takes images too. Raises
    `DiagnosticError`."""
    from stagec.importers.importing import import_model  # forty files that other models do not need
    from stagec.importers.registry import BUILT_IN, families_of, knows

    source = session.read(path if path == "-" else _file(path), MAX_CONFIGURATION)
    families = list(BUILT_IN)
    plugins = list(plugins)
    if plugins or not knows(source):
        from stagec.pipeline.plugins import load_plugins  # takes longer than all the rest

        families = families_of(load_plugins(plugins).registry.extras)
    remarks: list[Diagnostic] | None = [] if unknown else None
    model = import_model(source, families, ignored, images=images, remarks=remarks)
    session.report(*remarks or ())
    return Source(f"<import {source.name}>", model.text())


def _file(path: str) -> str:
    """The configuration that a path means."""
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG
        if not file.is_file():
            others = sorted(f.name for f in Path(path).iterdir() if f.suffix == ".json")[:5]
            raise error(
                f"folder {path} has no {CONFIG}",
                remedy=f"give the file itself: {', '.join(others)}"
                if others
                else "give a model's config.json, or the folder that has it",
            )
    return str(file)
