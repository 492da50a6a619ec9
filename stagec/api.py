"""The stable surface for authors of passes and ops: import from here and nowhere else.

What is listed in `__all__` changes only with a major version. docs/api.md has an example of each.
"""

from __future__ import annotations

from stagec.analysis.family import Family
from stagec.analysis.figures import Figures
from stagec.formats.base import Format, Layout, PatchedEncoder, Variant
from stagec.ir.builder import Builder
from stagec.ir.core import Attr, Operation, Quoted, Region, SymbolRef, Value
from stagec.ir.expr import Expr, as_expr, call, const, evaluate, product, symbol, total
from stagec.ir.facts import Facts, Relation
from stagec.ir.module import Mesh, Module, is_parameter
from stagec.ir.opdef import Array, NumericContext, OpDef, Param, Registry, Sizes, factor_sizes
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.types import AxisUse, Dim, Load, OpaqueType, Partial, TensorType, Type, axis_size
from stagec.ir_spec.phases import Phase
from stagec.pipeline.instrument import Hooks, Instrument
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass, Plugin
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.pipeline.spec import Pipeline, parse_pipeline, print_pipeline
from stagec.pipeline.verify import verify_module
from stagec.program.nodes import Program
from stagec.schedule.action import Action, Placement, StageChunk
from stagec.schedule.base import Schedule
from stagec.sharding.local import place_from_operands
from stagec.support.diagnostics import Diagnostic, DiagnosticError, DiagnosticList, error, note
from stagec.support.source import FileLoc, Loc, NameLoc, Source, made_by
from stagec.text.build import parse_module
from stagec.text.printer import print_module, print_op

__all__ = [
    "Action",
    "Array",
    "Attr",
    "AxisUse",
    "Builder",
    "Diagnostic",
    "DiagnosticError",
    "DiagnosticList",
    "Dim",
    "Expr",
    "Facts",
    "Family",
    "Figures",
    "FileLoc",
    "Format",
    "Hooks",
    "Instrument",
    "Layout",
    "Load",
    "Loaded",
    "Loc",
    "Mesh",
    "Module",
    "NameLoc",
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
    "Region",
    "Registry",
    "Relation",
    "Rule",
    "Schedule",
    "Sizes",
    "Source",
    "StageChunk",
    "SymbolRef",
    "TensorType",
    "Type",
    "Value",
    "Variant",
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
    "parse_module",
    "parse_pipeline",
    "place_from_operands",
    "print_module",
    "print_op",
    "print_pipeline",
    "product",
    "symbol",
    "total",
    "verify_module",
]
