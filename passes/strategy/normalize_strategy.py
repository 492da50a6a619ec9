"""normalize-strategy: removes axes of size 1, and checks the names in the statements of a
strategy."""

from stagec.api import DiagnosticList, Module, Pass, Phase, Region, Strategy, read_strategy
from stagec.ir.bind import drop_unit_axes
from stagec.ir_spec.strategy.gather import GatherRule
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.ir_spec.strategy.split import SplitRule
from stagec.support.suggest import did_you_mean


class NormalizeStrategy(Pass):
    """Remove mesh axes of size 1 from the module, and check the names in its `stg.strategy`.

    A statement over such axes only is removed with them. Unknown meshes, axes, dimensions and
    values, and statements that contradict each other, are errors. A remark names an axis that no
    statement uses.

    Before:
        stg.mesh @pod[dp = 2, tp = 1]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
          stg.split[D, over = tp]
        }
        stg.func @f(%x: bf16[B, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    After:
        stg.mesh @pod[dp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    """

    needs = Phase.SHAPED

    def run(self, module: Module) -> None:
        normalize_strategy(module)


def normalize_strategy(module: Module) -> None:
    """Remove axes of size 1, in place.

    Raises `DiagnosticError` with all unknown names and all contradictions.
    """
    _drop_unit_axes(module)
    strategy = read_strategy(module)
    problems = DiagnosticList()
    _check_mesh(module, problems)
    _check_names(module, strategy, problems)
    if strategy.pipeline is not None:
        _check_alone(module, strategy, strategy.pipeline, problems)
    _check_sequences(strategy, problems)
    problems.check()
    _warn_of_unused(module, strategy)


def _drop_unit_axes(module: Module) -> None:
    """Remove axes of size 1 from the mesh, from statements, and from placements in the model."""
    for axis in drop_unit_axes(module):
        for mesh in module.ops("stg.mesh"):
            mesh.attrs.pop(axis, None)


# -- names -----------------------------------------------------------------------------------------


def _check_mesh(module: Module, problems: DiagnosticList) -> None:
    mesh = module.mesh
    for op in module.ops("stg.strategy"):
        wanted = op.text("mesh").lstrip("@")
        if mesh and wanted and wanted != mesh.name:
            problems.error(
                f"the strategy is for mesh @{wanted}, but the mesh is @{mesh.name}",
                op.loc,
                remedy=f"write 'mesh = @{mesh.name}', or give the mesh that name",
            )


def _check_names(module: Module, strategy: Strategy, problems: DiagnosticList) -> None:
    """Report repeated axes and unknown values; the verifier checks axes and dimensions."""
    for rule in strategy.splits:
        if len(set(rule.over)) < len(rule.over):
            problems.error(
                f"an axis is named twice: {', '.join(rule.over)}", rule.loc, remedy="name it once"
            )
        _check_values(rule, module.main.body, problems)
    for whole in strategy.whole:
        _check_values(whole, module.main.body, problems)


def _check_values(rule: SplitRule | GatherRule, body: Region, problems: DiagnosticList) -> None:
    """Report unknown values, and values without the dimension."""
    for name in rule.of:
        named = [v for v in body.values() if v.is_called(name)]
        if not named:
            known = {v.name.rpartition("/")[2] for v in body.values()}
            problems.error(
                f"the model has no value '%{name}'",
                rule.loc,
                remedy=did_you_mean(name, known) or "'stagec models NAME' prints the model's text",
            )
        elif not any(s.symbols & set(rule.dims) for v in named for s in v.tensor.shape):
            problems.error(
                f"%{name} has no dimension {', '.join(rule.dims)}: {named[0].type}",
                rule.loc,
                remedy="name a dimension that it has",
            )


# -- statements that contradict each other ---------------------------------------------------------


def _check_alone(
    module: Module, strategy: Strategy, rule: PipelineRule, problems: DiagnosticList
) -> None:
    """Report other uses of the axis of pipeline stages."""
    others = [(s.over, s.loc) for s in strategy.splits]
    others += [(strategy.zero_axes, strategy.loc), (strategy.deferred, strategy.loc)]
    others += [(arg.tensor.axes, arg.loc) for arg in module.main.body.args]
    for axes, loc in others:
        if rule.over in axes:
            problems.error(
                f"the axis '{rule.over}' is used for pipeline stages",
                loc,
                remedy="split over another axis: each stage has whole layers",
            )


def _check_sequences(strategy: Strategy, problems: DiagnosticList) -> None:
    """Report dimensions with more than one of `stg.gather`, `stg.exchange` and `stg.ring`."""
    exchanged = [name for name, _ in strategy.exchanged]
    for name in exchanged:
        if name in strategy.gathered:
            problems.error(
                f"{name} is both gathered and exchanged, expected one of them",
                strategy.loc,
                remedy="keep one of stg.gather and stg.exchange",
            )
    for ring in strategy.rings:
        if ring.dim in (*strategy.gathered, *exchanged):
            problems.error(
                f"{ring.dim} is passed round a ring, and gathered or exchanged too, expected one "
                "of them",
                ring.loc,
                remedy="keep one of stg.ring, stg.gather and stg.exchange",
            )


def _warn_of_unused(module: Module, strategy: Strategy) -> None:
    used = {a for rule in strategy.splits for a in rule.over} | set(strategy.zero_axes)
    used |= {a for arg in module.main.body.args for a in arg.tensor.axes}
    used |= {strategy.pipeline.over} if strategy.pipeline is not None else set()
    for axis in (a for a in (module.mesh.axes if module.mesh else ()) if a not in used):
        module.diagnostics.remark(
            f"no statement uses the axis '{axis}': all its ranks do the same work", strategy.loc
        )
