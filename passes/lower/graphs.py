"""The attributes of graphs: their ranks, stages and parameters, and the caches of servers."""

from stagec.api import Module, Operation, axis_size
from stagec.ir.builder import RawAttr
from stagec.ir.types import CACHED


def graph_attributes(module: Module, func: Operation) -> dict[str, RawAttr]:
    """The attributes of the graph of a function."""
    mesh = module.mesh
    attrs: dict[str, RawAttr] = {n: func.attrs[n] for n in ("over", "stages") if n in func.attrs}
    axes = [a for a in (mesh.axes if mesh else ()) if a != attrs.get("over")]
    stages = attrs.get("stages", ())
    attrs["ranks"] = axis_size(axes) * (len(stages) if isinstance(stages, tuple) and stages else 1)
    attrs |= {n: func.attrs[n] for n in ("parameters", "trainable") if n in func.attrs}
    if "parameters" not in attrs:
        attrs |= module.parameter_counts()
    if any(a.tensor.role in CACHED for f in module.functions for a in f.body.args):
        attrs |= _served(func)
    return attrs


def _served(func: Operation) -> dict[str, RawAttr]:
    """The indices of the arguments of a step of serving that are caches, and of those with
    tokens."""
    roles = [a.tensor.role for a in func.body.args]
    caches = tuple(i for i, role in enumerate(roles) if role in CACHED)
    inputs = tuple(i for i, role in enumerate(roles) if not role)
    return {n: values for n, values in (("caches", caches), ("inputs", inputs)) if values}
