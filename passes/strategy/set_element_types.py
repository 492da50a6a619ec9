"""set-element-types: replaces the 16-bit type of the model by those that the strategy states."""

from dataclasses import replace

from stagec.api import (
    Loc,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Strategy,
    TensorType,
    Type,
    Value,
    is_parameter,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import enclosing
from stagec.ir.traits import Repeats
from stagec.ir_spec.strategy.dtypes import computed_in

#: The 16-bit type in which models are written.
WRITTEN = "bf16"


class SetElementTypes(Pass):
    """Give parameters and activations the element type of `stg.dtypes[param = ...]`.

    Values in bf16 get that type; values in f32 are not changed. If ZeRO-3 shards parameters and
    `compute` names another type, activations get that one, and each parameter is cast to it where
    it is used; in a repeat also in backward (`again`).

    Before:
        stg.strategy @s {
          stg.dtypes[param = f16]
        }
        stg.func @f(%x: bf16[B, D], %w: bf16[D, F | param], %g: f32[F]) -> bf16[B, F] {
          %y = stg.einsum["bd,df->bf"](%x, %w) : bf16[B, F]
          stg.return(%y)
        }
    After:
        stg.strategy @s {
          stg.dtypes[param = f16]
        }
        stg.func @f(%x: f16[B, D], %w: f16[D, F | param], %g: f32[F]) -> f16[B, F] {
          %y = stg.einsum["bd,df->bf"](%x, %w) : f16[B, F]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return {_compute(read_strategy(module)), read_strategy(module).dtypes.param} != {WRITTEN}

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        compute, param = _compute(strategy), strategy.dtypes.param
        if compute != WRITTEN:
            set_element_type(module, compute)
        if compute != param:
            cast_parameters(module, compute, param, strategy.dtypes.loc)


def _compute(strategy: Strategy) -> str:
    """The element type of activations."""
    return computed_in(strategy.dtypes, strategy.zero, strategy.dtypes.param)


def set_element_type(module: Module, dtype: str) -> None:
    """Replace the type in which models are written, in place."""
    body = module.main.body
    for value in body.values():
        if value.type is not None:
            value.type = _with_dtype(value.type, WRITTEN, dtype)
    body.returns = tuple(_with_dtype(t, WRITTEN, dtype) for t in body.returns)
    for op in body.walk():
        for name in ("to", "dtype"):
            if op.attrs.get(name) == WRITTEN:
                op.attrs[name] = dtype


def cast_parameters(module: Module, compute: str, rest: str, loc: Loc) -> None:
    """Give parameters of type `compute` the type `rest` at rest, and their users a cast, in
    place."""
    for region in (module.main.body, *(op.body for op in module.main.body.walk() if op.region)):
        for param in [v for v in region.args if is_parameter(v) and v.tensor.dtype == compute]:
            _cast_users(module, region, param, compute, loc)
            param.type = _with_dtype(param.tensor, compute, rest)


def _cast_users(module: Module, region: Region, param: Value, compute: str, loc: Loc) -> None:
    """Give the users of a parameter in its region a cast of it, except ops that bind it to a
    region."""
    users = [(user, index) for user, index in param.uses if user.region is None]
    if not users:
        return
    first = min((enclosing(user, region) for user, _ in users), key=Operation.position)
    b = module.before(first, loc=loc, by=SetElementTypes.name)
    attrs: dict[str, RawAttr] = {"to": compute}
    attrs |= {"again": True} if region.owner.has(Repeats) else {}
    type_ = replace(param.tensor.inner, dtype=compute, role="")
    cast = b.value("stg.cast", [param], attrs, type=type_, hint=f"{param.name}_{compute}")
    param.replace_with(cast, users)


def _with_dtype(type_: Type, old: str, new: str) -> Type:
    if isinstance(type_, TensorType) and type_.dtype == old:
        return replace(type_, dtype=new)
    return type_
