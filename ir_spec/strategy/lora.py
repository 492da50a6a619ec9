"""Low-rank adapters: which parameters are trained."""

from stagec.ir.core import Operation, Value
from stagec.ir.rewrite import uses_inside
from stagec.ir.rule import parse_rule
from stagec.ir.traits import Chooses, Recasts
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

#: The ends of the names of the parameters A and B of an adapter.
FIRST, SECOND = "_lora_a", "_lora_b"
#: Instead of names: all linear modules except the head, as `target_modules = "all-linear"` of peft.
ALL_LINEAR = "all_linear"


class LoraRule(Record):
    """The parameters that get low-rank adapters; all others are frozen. A server has `slots`
    adapters of each."""

    targets: tuple[str, ...] = parameter(
        "values",
        "names of parameters, the last parts of their paths, as in (wq, wv); all_linear: those of "
        "all linear modules of layers",
        required=True,
        flag=Flag(
            "lora",
            "Low-rank adapters of these parameters, such as wq,wv, or of all linear modules but "
            "the head (all-linear); training freezes all others, serving has --max-loras of each.",
            "names",
            "",
            metavar="NAME,...",
            numerics=True,
        ),
    )
    rank: int = flagged(
        "lora_rank",
        "The rank of the adapters; in serving the largest, which all are filled up to.",
        "int",
        default=16,
        least=1,
        needs=("lora",),
        numerics=True,
    )
    alpha: int = parameter("int", "the adapters' results are times alpha / rank (0: times 1)")
    slots: int = flagged(
        "max_loras",
        "With --serve and --lora: adapters that ranks hold, of which each sequence uses one at "
        "random.",
        "int",
        doc="adapters that a server holds, of which a sequence uses one",
        default=1,
        least=1,
        needs=("lora",),
        rare=True,
    )

    def adapts(self, param: Value) -> bool:
        """Whether a parameter gets adapters."""
        named = any(param.is_called(name) for name in self.targets)
        return named or (ALL_LINEAR in self.targets and _is_linear(param))


def _is_linear(param: Value) -> bool:
    """Whether a parameter belongs to a linear module in a layer, and not to experts, a router or an
    adapter."""
    if param.name.endswith((FIRST, SECOND)):
        return False
    uses = [(op, index) for op, index, depth in uses_inside(param) if depth]
    return any(isinstance(op.definition, Einsum) and _multiplies(op, index) for op, index in uses)


def _multiplies(op: Operation, index: int) -> bool:
    """Whether a product multiplies by a single matrix, and its result is not only used for a
    choice."""
    if len(op.operands) != 2:
        return False
    sides, (result,) = parse_rule(op.text("spec"))
    weight, other = sides[index], sides[1 - index]
    users = [user for user, _ in op.result.uses]
    users += [user for each in users if each.has(Recasts) for user, _ in each.result.uses]
    experts = any(g in other and g in result for g in weight)
    return not experts and any(g in result for g in weight) and not any(map(_chooses, users))


def _chooses(op: Operation) -> bool:
    return op.has(Chooses)


class LoraOp(Statement):
    """Low-rank adapters (LoRA, arXiv 2106.09685): a product x W with a parameter of these names
    becomes x W + x A B, and all parameters but A and B are frozen.

    A has the contracted dimensions of W and the rank, B the rank and the other dimensions: rank *
    (in + out) parameters for each matrix. `all_linear` means the parameters of products in layers,
    except experts and routers, which are parameters without a module in transformers
    (peft/tuners/tuners_utils.py: `_maybe_include_all_linear_layers`).

    A server has `slots` adapters for each parameter, padded to `rank`, and multiplies each sequence
    by its own; a single adapter can be added to the weights instead.
    """

    name, record = "stg.lora", LoraRule
    section = Section.PARTS
    example = "stg.lora[targets = (wq, wv), rank = 16]"
