"""What the job of some options costs, in a few numbers, of which sweeps and searches are made."""

from __future__ import annotations

from collections.abc import Hashable

from stagec.analysis.family import Family
from stagec.analysis.figures import Figures
from stagec.driver.common import report
from stagec.driver.instruments import instruments
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.text.printer import print_op

#: Structures that a process has compiled, the latest ones; what differs in sizes and degrees only
#: is one of them.
_families: dict[Hashable, Family] = {}
_MOST_KEPT = 256


def figures(options: JobOptions) -> Figures:
    """The figures of a job, whose structure is compiled once in a process. Raises
    `DiagnosticError`."""
    builder = JobBuilder(options)
    values = dict(builder.module.env)
    compiled = _family(builder).compiled(values, builder.module)
    for diagnostic in compiled.diagnostics:
        report(diagnostic)
    return compiled.at(values)


def _family(builder: JobBuilder) -> Family:
    """The jobs of these texts: model, names of axes, strategy, passes and plug-ins."""
    module, options, pipeline = builder.module, builder.options, builder.pipeline_text()
    texts = tuple(source.text for source in module.sources.values())
    stated = tuple(print_op(op) for op in (*module.ops("stg.assume"), *module.ops("stg.strategy")))
    axes = module.mesh.axes if module.mesh else ()
    key = texts, stated, axes, pipeline, options.plugin, options.check_numerics
    if key not in _families:
        while len(_families) >= _MOST_KEPT:
            del _families[next(iter(_families))]
        passes = builder.loaded.pipeline(pipeline)
        around = instruments(options, passes)
        _families[key] = Family(lambda _: JobBuilder(options).module, passes, around)
    return _families[key]
