"""All built-in operations of a text: ops, the statements of a strategy and their containers."""

from stagec.ir.opdef import OpDef
from stagec.ir_spec.ops import OPS
from stagec.ir_spec.strategy import STATEMENTS, space
from stagec.ir_spec.strategy.stack import StackOp
from stagec.ir_spec.strategy.strategy import StrategyOp

BUILTIN: tuple[OpDef, ...] = (StrategyOp(), StackOp(), *STATEMENTS, *space.OPS, *OPS)
