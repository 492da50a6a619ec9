"""`stagec import`: the text of a model from its config.json."""

from collections.abc import Collection
from pathlib import Path

import click

from stagec.driver.shell.click_options import takes
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import write_output
from stagec.jobs.request.configurations import import_configuration
from stagec.jobs.request.option import PLUGIN
from stagec.jobs.request.result import OUTPUT
from stagec.pipeline.manager import PassManager
from stagec.pipeline.plugins import load_plugins
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module


@click.command("import")
@click.argument("config")
@takes(OUTPUT)
@click.option(
    "--ignore-key",
    "ignored",
    multiple=True,
    metavar="NAME",
    help="Treat this key as absent; a nested key is written as text_config.NAME.",
)
@click.option(
    "--ignore-unknown",
    "unknown",
    is_flag=True,
    help="Treat every unknown key as absent, with a remark for each.",
)
@click.option("--images", is_flag=True, help="A step with images in addition to text.")
@click.option(
    "--inline",
    "inline",
    is_flag=True,
    help="Write the whole model, with blocks in place of their calls.",
)
@takes(PLUGIN)
def command(
    config: str,
    output: Path | None,
    ignored: Collection[str],
    *,
    images: bool,
    unknown: bool,
    inline: bool,
    plugin: tuple[Path, ...],
) -> None:
    """Write the STG text of a model from CONFIG, a config.json or a folder that holds one.

    The text calls blocks of the library with their options; --inline writes their ops instead. An
    unknown key that may change the computation is an error. Nothing is downloaded.
    """
    source = import_configuration(
        config, the_session(), ignored, plugin, images=images, unknown=unknown
    )
    write_output(_inlined(source, plugin) if inline else source.text, output)


def _inlined(source: Source, plugin: tuple[Path, ...]) -> str:
    """The text with all calls inlined."""
    loaded = load_plugins(plugin)
    the_session().remember(source)
    module = parse_module(source, loaded.registry)
    PassManager(loaded.pipeline("inline")).run(module)
    return print_module(module)
