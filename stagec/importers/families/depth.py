"""Attention residuals (arXiv 2607.24653): each part of a layer reads an average of the residual
streams before it, of which one is kept every few layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.importers.writing.blocks import RMS
from stagec.importers.writing.stack import Decoder, repeated, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class DepthLayer:
    """A layer whose parts read averages of the stream and of `earlier` ones. One that `starts` a
    block keeps its input, and does not add it to the result of its mixer."""

    mixer: Callee
    block: Callee
    earlier: Sequence[str]
    starts: bool = False

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`, and return the name of the result."""
        seen = attend_depth(body, "x1", x, self.earlier, "attn")
        n = RMS.write(body, "n1", seen, "attn_norm")
        a = body.call("a", self.mixer, n)
        kept = [*self.earlier, *[x] * self.starts]
        h = a if self.starts else body.let("r1", f"stg.add({x}, {a})")
        n = RMS.write(body, "n2", attend_depth(body, "x2", h, kept, "ffn"), "ffn_norm")
        return body.let("r2", f"stg.add({h}, {body.call('f', self.block, n)})")


def attend_depth(body: Body, out: str, x: str, earlier: Sequence[str], name: str) -> str:
    """Append the average of `x` and `earlier` streams, and return its name; `x` if there are none,
    with parameters that nothing uses."""
    role = "" if earlier else "frozen"
    norm = body.param(f"{name}_depth_norm", "D", role=role)
    query = body.param(f"{name}_depth_query", "D", role=role)
    if not earlier:
        return x
    return body.let(out, f"stg.attend_depth({', '.join([x, norm, query, *earlier])})")


def write_depth(
    text: ModelText, layers: Sequence[tuple[str, Callee, Callee]], size: int, decoder: Decoder
) -> ModelText:
    """Add the main function of a decoder with these layers (kind, mixer, feed-forward block), of
    which every `size` are a block, and return the text."""
    body, earlier = Body(), list[str]()
    x, table = decoder.embed(body, "x")
    for number, start in enumerate(range(0, len(layers), size)):
        (_, mixer, block), *rest = layers[start : start + size]
        first = DepthLayer(mixer, block, [*earlier], starts=True)
        begun = repeated(body, x, first, f"begun{number}", f"start{number}", "1")
        earlier.append(x)
        kinds = {f"{kind}{number}": DepthLayer(m, b, [*earlier]) for kind, m, b in rest}
        order = [f"{kind}{number}" for kind, *_ in rest]
        out = f"y{number}"
        x = write_stack(text, body, begun, kinds, order, name=f"block{number}", out=out)
        x = x if rest else begun
    x = attend_depth(body, "seen", x, earlier, "out")
    return decoder.end(text, body, x, table)
