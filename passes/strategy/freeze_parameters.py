"""freeze-parameters: freezes the parameters that a strategy names."""

from dataclasses import replace

from stagec.api import Module, Pass, Phase, read_strategy
from stagec.ir_spec.strategy.freeze import FreezeRule, matches
from stagec.support.suggest import did_you_mean


class FreezeParameters(Pass):
    """Give the parameters that `stg.freeze` names the role `frozen`, or `param` for negated
    patterns.

    Before:
        stg.strategy @s {
          stg.freeze["tower"]
        }
        stg.func @f(%tower/w: f32[D | param], %w: f32[D | param]) {
          stg.return
        }
    After:
        stg.strategy @s {
          stg.freeze["tower"]
        }
        stg.func @f(%tower/w: f32[D | frozen], %w: f32[D | param]) {
          stg.return
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).one(FreezeRule).names)

    def run(self, module: Module) -> None:
        freeze_parameters(module, read_strategy(module).one(FreezeRule))


def freeze_parameters(module: Module, rule: FreezeRule) -> None:
    """Freeze parameters of the main function, in place. Raises `DiagnosticError` for a pattern that
    matches no parameter, or if no parameter is left to train."""
    params = module.parameters()
    for pattern, _ in rule.patterns:
        if not any(matches(p.name, pattern) for p in params):
            known = {part for p in params for part in p.name.split("/")}
            raise rule.error(
                f"the model has no parameter or scope '{pattern}'",
                remedy=did_you_mean(pattern, known) or f"choose some of {', '.join(sorted(known))}",
            )
    for param in params:
        if (frozen := rule.freezes(param.name)) is not None:
            param.type = replace(param.tensor, role="frozen" if frozen else "param")
    if not module.trainable():
        raise rule.error(
            "all parameters are frozen",
            remedy="leave some, as in '*, !head', or compile without backward: --pipeline forward",
        )
