"""pad-vocabulary: rounds the size of the vocabulary up to a multiple that a strategy states."""

from stagec.api import Module, Pass, Phase, Strategy, Value, read_strategy
from stagec.ir_spec.strategy.pad_vocabulary import PadVocabularyRule


class PadVocabulary(Pass):
    """Round the symbol of the vocabulary, the last dimension of the logits of a loss, up to the
    multiple in `stg.pad_vocabulary` times the number of ranks that split it, or to the multiple
    itself with `whole`. In a step of serving this happens before `to-serving` removes the loss.

    Before:
        stg.symbols[B, S, V = 1000]
        stg.strategy @s {
          stg.pad_vocabulary[multiple = 128]
        }
        stg.func @f(%z: f32[B, S, V], %y: i32[B, S]) -> f32[] {
          %l = stg.cross_entropy[mean = B*S](%z, %y) : f32[]
          stg.return(%l)
        }
    After:
        stg.symbols[B, S, V = 1024]
        stg.strategy @s {
          stg.pad_vocabulary[multiple = 128]
        }
        stg.func @f(%z: f32[B, S, V], %y: i32[B, S]) -> f32[] {
          %l = stg.cross_entropy[mean = B*S](%z, %y) : f32[]
          stg.return(%l)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        asked = bool(read_strategy(module).all(PadVocabularyRule))
        return asked and (not module.serving or bool(_logits(module)))

    def run(self, module: Module) -> None:
        pad_vocabulary(module, read_strategy(module))


def pad_vocabulary(module: Module, strategy: Strategy) -> None:
    """Change the value of the symbol, in place, if it is not a multiple. A remark reports that
    there is no such symbol to be a multiple of more than the ranks."""
    rule = strategy.one(PadVocabularyRule)
    judged = _logits(module)
    names = {str(v.tensor.dims[-1].size.symbol_name or "") for v in judged} - {""}
    sizes = {name: module.symbols[name] for name in sorted(names & module.symbols.keys())}
    if rule.multiple > 1 and not any(sizes.values()):
        why = "no loss has a vocabulary that is a symbol with a value"
        module.diagnostics.remark(f"'stg.pad_vocabulary' changes nothing: {why}", rule.loc)
    for name, size in sizes.items():
        multiple = rule.multiple * (1 if rule.whole else strategy.ranks_of(name, module.mesh))
        if size is not None and size % multiple:
            module.set_values({name: -(-size // multiple) * multiple})


def _logits(module: Module) -> list[Value]:
    """The logits of the losses; none are left in a step of serving."""
    judged = (op.definition.logits(op) for op in module.main.body.walk())
    return [value for value in judged if value is not None]
