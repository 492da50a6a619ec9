"""`stagec import`: the text of a model from its own configuration."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import click

from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import write_output
from stagec.jobs.request.configurations import import_configuration


@click.command("import")
@click.argument("config")
@click.option("-o", "--output", metavar="FILE", help="Write the text here instead of stdout.")
@click.option(
    "--ignore-key",
    "ignored",
    multiple=True,
    metavar="NAME",
    help="Take a key as left out; one inside of another is written as text_config.NAME.",
)
@click.option(
    "--ignore-unknown",
    "unknown",
    is_flag=True,
    help="Take every key that is not known as left out, with a remark for each.",
)
@click.option("--images", is_flag=True, help="A step that takes images beside words.")
@click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file.")
def command(
    config: str,
    output: str | None,
    ignored: Collection[str],
    *,
    images: bool,
    unknown: bool,
    plugin: tuple[Path, ...],
) -> None:
    """Write the STG text of a model from CONFIG, a config.json or a folder that holds one.

    A key that changes the computation and is not understood is an error. Nothing is downloaded.
    """
    source = import_configuration(
        config, the_session(), ignored, plugin, images=images, unknown=unknown
    )
    write_output(source.text, output)
