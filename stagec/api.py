"""The stable surface for authors of passes and ops: import from here and nowhere else.

What is listed in `__all__` changes only with a major version. docs/reference/api has examples.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from stagec.formats.base import (
    Estimate,
    Format,
    JobFormat,
    Layout,
    PatchedEncoder,
    TraceJob,
    Variant,
    all_ranks,
)
from stagec.importers.family import ModelFamily
from stagec.ir import traits
from stagec.ir.builder import Builder
from stagec.ir.core import Attr, Operation, Quoted, Region, SymbolRef, Value
from stagec.ir.expr import Expr, as_expr, call, const, evaluate, product, symbol, total
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.facts import Facts, Relation
from stagec.ir.index_rule import IndexRule
from stagec.ir.module import Mesh, Module, is_parameter
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Registry, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.types import AxisUse, Dim, Load, OpaqueType, Partial, TensorType, Type, axis_size
from stagec.ir_spec.phases import Phase
from stagec.ir_spec.strategy.statement import Record, Statement, parameter
from stagec.pipeline.instrument import Hooks, Instrument
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass, Plugin
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.pipeline.spec import Pipeline, parse_pipeline, print_pipeline
from stagec.pipeline.verify import verify_module
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Node, Program
from stagec.schedule.action import Action, Placement, StageChunk
from stagec.schedule.base import Schedule
from stagec.serving.policy import BatchingPolicy, LiveRequest, ServerLimits, ServerState, StepPlan
from stagec.serving.requests import Request
from stagec.sharding.local import place_from_operands
from stagec.sharding.strategy import Strategy, read_strategy
from stagec.support.diagnostics import Diagnostic, DiagnosticError, DiagnosticList, error, note
from stagec.support.source import FileLoc, Loc, NameLoc, Source, made_by
from stagec.text.build import parse_module
from stagec.text.printer import print_module, print_op

if TYPE_CHECKING:
    from stagec.analysis.family import Family
    from stagec.analysis.figures import Figures
    from stagec.analysis.time_report import TimeReport
    from stagec.importers.reading.config import Config
    from stagec.importers.writing.text import Body, Callee, ModelText
    from stagec.interface import time_step

__all__ = [
    "Action",
    "Array",
    "Attr",
    "AxisUse",
    "BatchingPolicy",
    "Body",
    "Builder",
    "Callee",
    "Config",
    "Diagnostic",
    "DiagnosticError",
    "DiagnosticList",
    "Dim",
    "Estimate",
    "Expr",
    "Facts",
    "Family",
    "Figures",
    "FileLoc",
    "Format",
    "Grads",
    "GroupAxes",
    "Hooks",
    "IndexRule",
    "Instrument",
    "JobFormat",
    "Layout",
    "LiveRequest",
    "Load",
    "Loaded",
    "Loc",
    "Mesh",
    "ModelFamily",
    "ModelText",
    "Module",
    "NameLoc",
    "Node",
    "NumericContext",
    "OpDef",
    "OpaqueType",
    "Operation",
    "Param",
    "Partial",
    "Pass",
    "PassManager",
    "PatchedEncoder",
    "Phase",
    "Pipeline",
    "Placement",
    "Plugin",
    "Program",
    "Quoted",
    "Record",
    "Region",
    "Registry",
    "Relation",
    "Request",
    "Rule",
    "Schedule",
    "ServerLimits",
    "ServerState",
    "Sizes",
    "Source",
    "Splits",
    "StageChunk",
    "Statement",
    "StepPlan",
    "Strategy",
    "SymbolRef",
    "TensorType",
    "TimeReport",
    "TraceJob",
    "Type",
    "Value",
    "Variant",
    "all_ranks",
    "as_expr",
    "axis_size",
    "call",
    "const",
    "error",
    "evaluate",
    "factor_sizes",
    "is_parameter",
    "letters",
    "load_plugins",
    "made_by",
    "make_rule",
    "note",
    "parameter",
    "parse_module",
    "parse_pipeline",
    "place_from_operands",
    "print_module",
    "print_op",
    "print_pipeline",
    "product",
    "read_strategy",
    "symbol",
    "time_step",
    "total",
    "traits",
    "verify_module",
]

#: Names whose modules no pass needs: they are imported when the names are asked for.
_LATER: Mapping[str, str] = {
    "Body": "stagec.importers.writing.text",
    "Callee": "stagec.importers.writing.text",
    "Config": "stagec.importers.reading.config",
    "Family": "stagec.analysis.family",
    "Figures": "stagec.analysis.figures",
    "ModelText": "stagec.importers.writing.text",
    "TimeReport": "stagec.analysis.time_report",
    "time_step": "stagec.interface",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_LATER[name]), name)
