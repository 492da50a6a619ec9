"""The whole of a decoder-only model: embedding, the stack of its layers, final norm, head, loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stagec.importers.blocks import RMS, Layer, Norm
from stagec.importers.text import Body, ModelText


@dataclass(frozen=True, slots=True)
class Decoder:
    """What stands around the layers. `tied` heads use the embedding's table."""

    norm: Norm = RMS
    tied: bool = False
    head_bias: bool = False

    def write(self, text: ModelText, kinds: Mapping[str, Layer], order: Sequence[str]) -> ModelText:
        """Add the function that is compiled, with layers of these kinds in this order; the text."""
        body = Body()
        table = body.param("embed", "V, D")
        x = body.let("x", f"stg.embedding({table}, %tokens)")
        x = write_stack(text, body, x, kinds, order)
        self._write_head(body, x, table)
        text.train("%tokens: i32[B, S], %labels: i32[B, S]", body)
        return text

    def _write_head(self, body: Body, x: str, table: str) -> None:
        n = self.norm.write(body, "n", x, "norm")
        rule, weight = ("bsd,vd->bsv", table) if self.tied else ("bsd,dv->bsv", "")
        weight = weight or body.param("head", "D, V")
        steps = [f'stg.einsum["{rule}"]({{}}, {weight})']
        if self.head_bias:
            steps.append(f'stg.add["bsv,v->bsv"]({{}}, {body.param("head_bias", "V")})')
        z = body.steps("z", n, steps)
        logits = body.let("logits", f"stg.cast[f32]({z})")
        loss = body.let("loss", f"stg.cross_entropy[mean = B*S]({logits}, %labels)")
        body.do(f"stg.return({loss})")


def write_stack(
    text: ModelText, body: Body, x: str, kinds: Mapping[str, Layer], order: Sequence[str]
) -> str:
    """Append one repeat for each kind of layers on `x`; the result's name.

    Kinds that follow each other, each once, are a chain of repeats; any other order is stated by
    `stg.order`, and the counts are numbers then.
    """
    runs = [(kind, len(list(run))) for kind, run in groupby(order)]
    mixed = len(runs) > len(set(order))
    if mixed:
        text.declarations.append(f"stg.order @layers[{order_text(order)}]")
    for number, kind in enumerate(dict.fromkeys(order), 1):
        count = str(order.count(kind)) if mixed else _count(text, kind, order.count(kind))
        inner = Body()
        h = f"h{number}" if number > 1 else "h"
        last = kinds[kind].write(inner, f"%{h}")
        inner.do(f"stg.yield({last})")
        where = ", order = @layers" if mixed else ""
        out = f"y{number}" if number < len(set(order)) else "y"
        head = f"%{out} = stg.repeat @{kind}[count = {count}, carry = 1{where}] (%{h} = {x}) {{"
        body.nested(head, inner)
        x = f"%{out}"
    return x


def _count(text: ModelText, kind: str, count: int) -> str:
    """The symbol of the number of layers of a kind: L of the kind `layers`, else L_kind."""
    name = "L" if kind == "layers" else f"L_{kind}"
    return text.symbol(name, count, f"{kind} layers" if kind != "layers" else "num_hidden_layers")


def order_text(order: Sequence[str]) -> str:
    """An order of kinds in short: `(5*local, global)*10, 2*local`. Of all periods the one that
    leaves the shortest text is taken."""
    best = _runs_text(order)
    for period in range(2, len(order) // 2 + 1):
        repeats = 1
        while order[repeats * period : (repeats + 1) * period] == order[:period]:
            repeats += 1
        if repeats > 1:
            rest = order[repeats * period :]
            text = f"({_runs_text(order[:period])})*{repeats}"
            text += f", {_runs_text(rest)}" if rest else ""
            best = min(best, text, key=len)
    return best


def _runs_text(order: Sequence[str]) -> str:
    runs = [(kind, len(list(run))) for kind, run in groupby(order)]
    return ", ".join(kind if count == 1 else f"{count}*{kind}" for kind, count in runs)
