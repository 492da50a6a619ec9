"""What a step costs: parameters, FLOPs, communication and memory of every class of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import has_pods
from stagec.driver.job.serving import serving_figures
from stagec.driver.job.verdict import verdict_on
from stagec.driver.output.report import Report
from stagec.driver.request.limit import AT_HAND, Limit
from stagec.driver.request.options import JobOptions
from stagec.driver.request.units import on_machine
from stagec.driver.verbs.pods import PodsAnalysis, analyze_pods
from stagec.pipeline.instrument import STATED, Hooks
from stagec.support.diagnostics import DiagnosticError, error

if TYPE_CHECKING:
    from stagec.machines import Machine


@dataclass(frozen=True)
class JobAnalysis(Report):
    """The counts of a step: the object of `stagec analyze --json` (docs/json.md)."""

    data: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """The ranks of the job."""
        return int(self.data["ranks"])

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of the mesh, slowest first."""
        mesh: Mapping[str, int] = self.data["mesh"]
        return mesh

    @property
    def parameters(self) -> Any:
        """The parameters of the model, counted once; an expression if it is symbolic."""
        return self.data["parameters"]

    @property
    def model_flops(self) -> Any:
        """FLOPs of a step by the model's text; a multiply-add is 2."""
        return self.data["model_flops"]

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        """The classes of ranks, those of which all do the same: FLOPs by phase, collectives,
        messages and memory in bytes, of one rank each."""
        classes: list[Mapping[str, Any]] = self.data["classes"]
        return classes

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks."""
        return [dict(each) for each in self.classes]

    def print(self, stream: TextIO) -> None:
        from stagec.driver.output.analysis_table import print_analysis

        print_analysis(dict(self.data), stream)


def analyze(
    options: JobOptions,
    *,
    symbolic: bool = False,
    machine: Machine | None = None,
    limit: Limit | None = None,
) -> JobAnalysis | PodsAnalysis:
    """The counts of a step. With `symbolic` they are expressions in the symbols. Of a step of
    serving, `machine` says whether each op waits for memory or computes, and `limit` which batch is
    the largest that fits. Raises `DiagnosticError`."""
    if has_pods(options):
        if machine is not None:
            raise _of_one_step()
        return analyze_pods(options, symbolic=symbolic, limit=limit)
    builder = JobBuilder(on_machine(options, machine), symbolic=symbolic)
    _check(builder, limit, machine)
    from stagec.analysis.footprint import peak_bytes, worst_moments
    from stagec.analysis.model_flops import model_flops
    from stagec.analysis.report import analysis

    worst, flops = Planned(worst_moments), Planned(model_flops, *STATED)
    kept = Planned(lambda m: serving_figures(m, builder, limit, machine, symbolic=symbolic))
    most = Planned(peak_bytes)
    watching: list[Hooks] = [
        worst,
        flops,
        *([most] if machine is not None else []),
        *([kept] if builder.serving is not None else []),
    ]
    module = builder.lower(watching=watching)
    result = analysis(
        module,
        builder.model_name,
        symbolic=symbolic,
        worst=worst.found or {},
        flops=flops.found,
    )
    result["repeated"] = builder.repeated.shares
    if kept.found is not None:
        from stagec.analysis.op_bounds import op_bounds

        ops = op_bounds(module, symbolic=symbolic, machine=machine)
        result["serving"] = {**kept.found, "ops": ops}
    if machine is not None:
        result |= verdict_on(machine, result["mesh"], most.found)
    return JobAnalysis(result)


def _check(builder: JobBuilder, limit: Limit | None, machine: Machine | None) -> None:
    """Refuse what is about serving where there is none, and a limit that is not given."""
    if limit is not None and builder.serving is None:
        raise error("--limit of one job is for 'stagec memory'", remedy="add --sweep, or run that")
    if limit is not None and limit.text == AT_HAND and machine is None:
        raise error("--limit machine is about the --machine", remedy="add --machine h100")
    if machine is not None and builder.serving is None:
        raise _of_one_step()


def _of_one_step() -> DiagnosticError:
    return error(
        "--machine is about the ops of one step of serving",
        remedy="leave it out, or run 'stagec time'",
    )
