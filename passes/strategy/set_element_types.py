"""set-element-types: the model's 16-bit type becomes the one that the strategy chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagec.api import Module, Pass, Phase, TensorType, Type, read_strategy

#: The 16-bit type that models are written in.
WRITTEN = "bf16"


@dataclass(frozen=True)
class SetElementTypes(Pass):
    """Give parameters and activations the element type of `stg.dtypes[param = ...]`.

    What the model writes in bf16 gets that type; what it writes in f32 stays.

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

    name = "set-element-types"
    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).dtypes.param != WRITTEN

    def run(self, module: Module) -> None:
        set_element_type(module, read_strategy(module).dtypes.param)


def set_element_type(module: Module, dtype: str) -> None:
    """Replace the type that models are written in, in place."""
    body = module.main.body
    for value in body.values():
        if value.type is not None:
            value.type = _with_dtype(value.type, dtype)
    body.returns = tuple(_with_dtype(t, dtype) for t in body.returns)
    for op in body.walk():
        for name in ("to", "dtype"):
            if op.attrs.get(name) == WRITTEN:
                op.attrs[name] = dtype


def _with_dtype(type_: Type, dtype: str) -> Type:
    if isinstance(type_, TensorType) and type_.dtype == WRITTEN:
        return replace(type_, dtype=dtype)
    return type_
