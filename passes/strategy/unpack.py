"""Splits products with a packed parameter into products with parameters of their own."""

from dataclasses import replace

from stagec.api import Module, Operation, Quoted, Value, is_parameter
from stagec.ir.core import renumber
from stagec.ir.module import uncast
from stagec.ir.rewrite import drop_unused_bindings, replace_op, slice_into
from stagec.ir.rule import parse_rule, shape_text
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.strategy.statement import patterns


def unpack_product(module: Module, unbind: Operation) -> None:
    """Give the parts that an op unbinds products of their own, in place. This needs a dimension
    that the product has from its parameter (or a cast of it) only, and no other user of both."""
    product = unbind.operands[0].producer
    if product is None or not isinstance(product.definition, Einsum) or "to" in product.attrs:
        return
    params = [i for i, v in enumerate(product.operands) if is_parameter(_uncast(v))]
    if len(params) != 1 or len(product.result.uses) != 1:
        return
    sides, (out,) = parse_rule(product.text("spec"))
    mine, packed = sides[params[0]], out[unbind.integer("dim")]
    weight = product.operands[params[0]]
    chain, cast = _chain(_uncast(weight)), weight.producer
    experts = {*sides[0]} & {*sides[1]} & {*out}  # grouped products stay packed
    if packed in sides[1 - params[0]] or packed not in mine or experts or not chain:
        return
    names = _names(chain[-1].name, len(unbind.results))
    texts = [shape_text(tuple(g for g in s if g != packed)) for s in (*sides, out)]
    spec = f"{','.join(texts[:-1])}->{texts[-1]}"
    b = module.before(product)
    made: list[Value] = []
    for name, part in zip(names, unbind.results, strict=True):
        operands = list(product.operands)
        own = _part(module, chain, name, mine.index(packed))
        if cast is not None:
            own = b.value(cast.name, [own], cast.attrs, hint=f"{name}_{weight.tensor.dtype}")
        operands[params[0]] = own
        attrs = {**product.attrs, "spec": spec}
        made.append(b.value(product.name, operands, attrs, hint=part.name))
    replace_op(unbind, made)
    product.erase()
    if cast is not None:
        cast.erase()
    for arg in chain[:-1]:
        drop_unused_bindings(arg.region.owner)
    args = module.main.body.args
    del args[chain[-1].index]
    renumber(args)
    _name_parts(module, _last(chain[-1].name), [_last(name) for name in names])


def _uncast(value: Value) -> Value:
    """The value before a cast without other users; else the value itself."""
    return uncast(value) if len(value.uses) == 1 else value


def _chain(param: Value) -> list[Value]:
    """The values of a parameter from the operand of the product over the repeats around it to the
    argument of the function; empty if another op uses it."""
    chain = [param]
    while len(param.uses) == 1 and param.index < len(param.region.owner.operands):
        param = param.region.owner.operands[param.index]
        chain.append(param)
    return chain if len(param.uses) == 1 else []


def _part(module: Module, chain: list[Value], name: str, dim: int) -> Value:
    """Add a parameter for a part of the packed one. Returns its slice for the product."""
    whole = chain[-1].tensor
    at = whole.rank - chain[0].tensor.rank + dim
    type_ = replace(whole, dims=(*whole.dims[:at], *whole.dims[at + 1 :]))
    value = module.main.body.add_arg(name, type_, chain[-1].loc)
    for arg in reversed(chain[:-1]):
        value = slice_into(arg.region.owner, value)
    return value


def _names(packed: str, count: int) -> list[str]:
    """The names of the parts: `w_gate` and `w_up` of `w_gate_up`, numbered ones for others."""
    path, _, last = packed.rpartition("/")
    lead, parts = last.partition("_")[0], last.split("_")[1:]
    own = [f"{lead}_{p}" for p in parts] if len(parts) == count else []
    own = own or [f"{last}_{i}" for i in range(count)]
    return [f"{path}/{name}" if path else name for name in own]


def _name_parts(module: Module, packed: str, parts: list[str]) -> None:
    """Let statements that name a packed parameter, such as `stg.offload`, name its parts instead,
    and also the packed one while another parameter has that name."""
    named = [*parts, *(packed for p in module.parameters() if p.is_called(packed))]
    for op in (op for strategy in module.ops("stg.strategy") for op in strategy.body.ops):
        for param in (p for p in op.definition.params if p.kind in ("values", "patterns")):
            texts: list[str] = []
            for item in patterns(op, param.name):  # such as layers/swiglu/w_gate_up:1/2
                path, colon, share = item.partition(":")
                scope = path.removesuffix(_last(path))
                names = named if _last(path) == packed else [_last(path)]
                texts += (f"{scope}{name}{colon}{share}" for name in names)
            if texts != [*patterns(op, param.name)]:
                own = tuple(dict.fromkeys(texts))
                op.attrs[param.name] = own if param.kind == "values" else Quoted(", ".join(own))


def _last(path: str) -> str:
    return path.rpartition("/")[2]
