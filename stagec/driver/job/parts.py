"""`--part`: a training step in several pods, each of which has a part of the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.pods import about_pod, read_flags
from stagec.driver.output.common import reports_once
from stagec.driver.request.flags import FLAGS
from stagec.driver.request.options import JobOptions
from stagec.driver.request.serving import BATCH
from stagec.ir.module import Module
from stagec.ir_spec.ops.axes import AXES
from stagec.ir_spec.ops.parts import MAIN
from stagec.ir_spec.ops.statement import Flag
from stagec.ir_spec.phases import Phase
from stagec.pipeline.instrument import Hooks
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.program.nodes import Ints

#: The last pass before values cross, and the one behind it.
_PLACED, _BEHIND = "eliminate-dead-code", "offload-to-host"
_OF_MESH = ("mesh", "ranks")


@dataclass(frozen=True)
class Parts:
    """The builder and the lowered module of each part, `main` first; and by part and other part,
    the ranks of that one that its messages go to or come from."""

    builders: Mapping[str, JobBuilder]
    modules: Mapping[str, Module]
    far: Mapping[str, Mapping[str, Sequence[Ints]]]

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.builders[MAIN].model_name


def part_names(options: JobOptions) -> tuple[str, ...]:
    """The parts that options ask for, `main` first."""
    return (MAIN, *(part.name for part in options.part))


def lower_parts(
    options: JobOptions, watching: Mapping[str, Sequence[Hooks]] | None = None
) -> Parts:
    """Compile the pod of each part, each with its further instruments. Raises `DiagnosticError`.

    Each is compiled up to where values cross, then further, since who sends what to whom takes the
    placements of all.
    """
    from stagec.program.parts import part_crossings
    from stagec.text.printer import print_module

    builders: dict[str, JobBuilder] = {}
    running: dict[str, Iterator[str]] = {}
    far: dict[str, dict[str, Sequence[Ints]]] = {name: {} for name in part_names(options)}
    with tempfile.TemporaryDirectory() as folder, reports_once():
        texts = {name: Path(folder) / f"{name}.stg" for name in far}
        for name, text in texts.items():
            with about_pod(name):
                builder = builders[name] = _builder(name, options, builders.get(MAIN))
                passes = [builder.pipeline_text()]
                others = (path for other, path in texts.items() if other != name)
                passes += (f"+before({_BEHIND}):connect-parts{{module={p}}}" for p in others)
                seen = (watching or {}).get(name, ())
                running[name] = builder.passes(watching=seen, text=",".join(passes))
                _run_until_placed(running[name], builder.module)
            text.write_text(print_module(builder.module), encoding="utf-8")
        for one, other in combinations(far, 2):
            found = part_crossings(builders[one].module, builders[other].module)
            far[one][other], far[other][one] = found.peers[one], found.peers[other]
        for name, rest in running.items():
            with about_pod(name):
                for _ in rest:
                    pass
    return Parts(builders, {name: each.module for name, each in builders.items()}, far)


def _run_until_placed(running: Iterator[str], module: Module) -> None:
    """Run the passes up to where values cross."""
    for name in running:
        if name == _PLACED and module.phase == Phase.PARTITIONED.label:
            return


def strategies_of_parts(options: JobOptions) -> str:
    """The texts of mesh and strategy of all parts. Raises `DiagnosticError`."""
    found: list[str] = []
    main: JobBuilder | None = None
    with reports_once():
        for name in part_names(options):
            builder = _builder(name, options, main)
            main = main or builder
            found.append(f"// {name}\n{builder.strategy()}")
    return "".join(found)


def _builder(name: str, options: JobOptions, main: JobBuilder | None) -> JobBuilder:
    """What compiles the pod of a part; the others have the batch of `main`."""
    builder = JobBuilder(options_of_part(name, options))
    if main is not None and (batch := main.module.symbols.get(BATCH)) is not None:
        given = {"sizes": {**builder.options.sizes, BATCH: batch}}
        alike = options.changed(**({"batch": batch} if options.serve else given))
        builder = JobBuilder(options_of_part(name, alike))
    return builder


def options_of_part(name: str, options: JobOptions) -> JobOptions:
    """The options of a part: of the mesh what its own flags give, of all else what the job says
    where they say nothing. Raises `DiagnosticError`."""
    if options.pipeline is not None or options.strategy is not None or options.preset:
        raise error(
            "--part gives each part a strategy of its own, and is about flags",
            remedy="give flags: --tp 8 --part 'encoder=e: tp=2,dp=4'",
        )
    dumps = options.dump_dir and options.dump_dir / name
    found = options.changed(keep=name, dump_dir=dumps)
    if name == MAIN:
        return found
    (part,) = (part for part in options.part if part.name == name)
    given = read_flags(f"--part {name}", part.flags)
    named = given.explicit | {n for n in _OF_MESH if getattr(given, n) is not None}
    if "part" in named:
        raise error("--part stands in a part", remedy="give each part a --part of its own")
    axes = {n for n in AXES if getattr(given, n) > 1} | set(given.mesh or {})
    lost = {n for n, flag in FLAGS.items() if n in AXES or _lacks(flag, axes)} - named
    usual = {n: FLAGS[n].default for n in lost} | dict.fromkeys(_OF_MESH)
    said = {n: getattr(given, n) for n in named}
    return found.changed(**(usual | said), explicit=(found.explicit - lost) | named)


def _lacks(flag: Flag, axes: Set[str]) -> bool:
    """Whether a flag has no effect on a mesh of these axes."""
    each = ((need,) if isinstance(need, str) else need for need in flag.needs)
    return any(set(names) <= set(AXES) and not axes & set(names) for names in each)
