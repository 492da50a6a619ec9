"""The option `--preset NAME`: a published run, which may be a step of serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.models import Preset, presets
from stagec.support.diagnostics import error
from stagec.support.named import find

if TYPE_CHECKING:
    from stagec.jobs.request.options import JobOptions


def find_preset(options: JobOptions) -> Preset:
    """The preset that options name. Raises `DiagnosticError`."""
    preset = find("preset", options.preset, presets())
    if options.strategy is not None:
        raise error(
            f"--preset {options.preset} and {options.strategy} cannot be used together: both give "
            "the strategy",
            remedy=f"leave one of them out; 'stagec presets {options.preset}' prints the text of "
            "the preset",
        )
    return preset


def with_step(options: JobOptions) -> JobOptions:
    """The options with the step of serving of their preset, as if it had been given. Given options
    take precedence. Raises `DiagnosticError`."""
    if not options.preset:
        return options
    preset = find_preset(options)
    step = {n: v for n, v in preset.step.items() if n not in options.explicit}
    return options.changed(**step, explicit=options.explicit | step.keys())
