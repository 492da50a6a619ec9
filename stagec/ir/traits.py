"""Traits: properties of ops that algorithms query.

An op lists its traits (`traits = (View(),)`); `op.has(View)` queries one. A trait includes its base
classes: an op with `View` has `Free` too. The rows of the tables below are examples; a test
compares them with the built-in ops.
"""

from dataclasses import fields

from stagec.support.frozen import Frozen


class Trait(Frozen):
    """Base of all traits. Prints as its name and its fields."""

    def __str__(self) -> str:
        said = [str(v) for v in (getattr(self, f.name) for f in fields(self)) if v]
        return type(self).__name__ + (f"({', '.join(said)})" if said else "")


# -- cost and order --------------------------------------------------------------------------------


class Free(Trait):
    """The op costs nothing at run time: it is not a node of a trace.

    | op              | |
    |-----------------|-|
    | `stg.reshape`   | yes: a view |
    | `stg.constant`  | yes |
    | `stg.repeat`    | yes: what is inside costs |
    | `stg.permute`   | no: it copies |
    | `stg.send`      | no |
    """


class Stays(Trait):
    """The op has effects besides its results: it is not erased if they are unused, and not merged
    with an equal op.

    | op              | |
    |-----------------|-|
    | `stg.gradient` | yes: the optimizer is added later |
    | `stg.send`      | yes |
    | `stg.adamw`     | yes: it updates its operands |
    | `stg.all_gather`| no |
    """


class CopiesMemory(Trait):
    """The op copies between memories, so its operand may be in host memory. All other ops use
    values on the device only.

    | op              | |
    |-----------------|-|
    | `stg.copy`      | yes |
    | `stg.permute`   | no: a copy on the device |
    """


class Fusible(Trait):
    """A compiler can fuse the op with its neighbours: an element of its results depends on one or a
    few elements of each operand. With `rows` it depends on a row along the last dimension.

    | op              | |
    |-----------------|-|
    | `stg.add`       | yes |
    | `stg.swiglu`    | yes: two elements of its operand |
    | `stg.rmsnorm`   | yes: rows |
    | `stg.sum`       | no: it may sum over any dimension |
    | `stg.embedding` | no: which elements it takes is known at run time |
    | `stg.adamw`     | no: each parameter has its update |
    """

    rows: bool = False


class TurnsRows(Fusible):
    """The op rotates rows by their positions. Engines rotate queries in the kernel that writes
    rotated keys into a cache.

    | op              | |
    |-----------------|-|
    | `stg.rope`      | yes |
    | `stg.swiglu`    | no |
    """


class AppendsRows(Trait):
    """The op writes the rows of new tokens, its last operand, into a cache.

    | op              | |
    |-----------------|-|
    | `stg.append`    | yes |
    | `stg.concat`    | no: it copies all |
    """


# -- buffers ---------------------------------------------------------------------------------------


class View(Free):
    """The results of the op are views of operand 0.

    | op              | |
    |-----------------|-|
    | `stg.reshape`   | yes |
    | `stg.all_slice` | yes: the local part |
    | `stg.concat`    | no: it copies |
    | `stg.constant`  | no: it has no operand |
    """


class PartOfBuffer(View):
    """Each result is a view of its operand, and all operands are parts of one buffer.

    | op              | |
    |-----------------|-|
    | `stg.part_of`   | yes |
    | `stg.reshape`   | no: it has one operand |
    """


class Recalls(Free):
    """The result of the op is operand 0 in iterations that recompute, else operand 1.

    | op              | |
    |-----------------|-|
    | `stg.recall`    | yes |
    | `et.recall`     | yes |
    | `stg.reshape`   | no |
    """


class InPlace(Stays):
    """The op updates operands: result i takes the buffer of operand `operands[i]`.

    | op              | |
    |-----------------|-|
    | `stg.adamw`     | yes |
    | `stg.all_reduce`| no: that its result takes the buffer of its operand is invisible to others |
    """

    operands: tuple[int, ...] = ()


class EndsLifetime(Trait):
    """The buffers of the operands end here. The op does not use the values.

    | op              | |
    |-----------------|-|
    | `stg.free`      | yes |
    | `stg.reshard`   | no: a use, up to which gathered parameters live |
    """


# -- meaning ---------------------------------------------------------------------------------------


class Wide(Trait):
    """Autocast computes the op in fp32 (the list `fp32` of `torch.autocast`).

    | op                | |
    |-------------------|-|
    | `stg.log_softmax` | yes |
    | `stg.softmax`     | yes |
    | `stg.layernorm`   | yes |
    | `stg.power`       | yes |
    | `stg.rope`        | yes: it multiplies by cosines in fp32 |
    | `stg.silu`        | no: in the type of its operand |
    """


class StaysUntilNext(Trait):
    """The buffers of the results stay until the next op with this trait, or until backward ends.

    | op              | |
    |-----------------|-|
    | `stg.copy_in`   | yes: FSDP2 keeps the input of a reduce-scatter until that of the next unit |
    | `stg.copy`      | no |
    """


class KeepsPart(Trait):
    """The results are parts of gathered parameters, which are gathered again like parameters.

    | op              | |
    |-----------------|-|
    | `stg.keep_part` | yes |
    | `stg.all_slice` | no |
    """


class Recasts(Trait):
    """The result is operand 0 in another element type.

    | op              | |
    |-----------------|-|
    | `stg.cast`      | yes |
    | `stg.scale`     | no |
    """


class Chooses(Trait):
    """Operand 0 are scores by which the op chooses: their precision is not reduced.

    | op              | |
    |-----------------|-|
    | `stg.route`     | yes: the experts of a token |
    | `stg.softmax`   | no |
    """


class PicksOne(Trait):
    """The first result is the index of one element of each row of operand 0, such as a sampled
    token.

    | op              | |
    |-----------------|-|
    | `stg.argmax`    | yes |
    | `stg.route`     | no: several, with their weights |
    """


class TakesLogits(Trait):
    """Operand 0 are logits, which the op uses by rows: a loss, or the first op of a loss.

    | op                  | |
    |---------------------|-|
    | `stg.cross_entropy` | yes |
    | `stg.log_softmax`   | yes |
    | `stg.nll_loss`      | no: log-probabilities |
    """


class FinalGradient(Trait):
    """The operand is a complete gradient: the collectives that reduce and place it belong to the
    phase `gradient`.

    | op              | |
    |-----------------|-|
    | `stg.gradient`  | yes |
    | `stg.adamw`     | no: it uses such gradients |
    """


class AddsToSum(Trait):
    """The op adds operand 0 to a sum over microbatches, which the kernel that makes operand 0 can
    do itself.

    | op                    | |
    |-----------------------|-|
    | `stg.accumulate_grad` | yes |
    | `stg.add`             | no: it makes a new value |
    """


class BeginsBackward(Trait):
    """The gradient of the operand does not come from the loss.

    | op              | |
    |-----------------|-|
    | `stg.depart` | yes: from the part of the model that receives it |
    | `stg.send`      | no |
    """


class Lowered(Trait):
    """The op belongs to a lowered graph, where values are nodes.

    | op              | |
    |-----------------|-|
    | `et.comp`       | yes |
    | `et.graph`      | yes |
    | `stg.einsum`    | no |
    """


# -- declarations ----------------------------------------------------------------------------------


class Declares(Free, Stays):
    """The op is a declaration and computes nothing. The module finds it by `what`: `symbols` and
    `axes` (its parameters are the names), `relations`, `order`, `layers`, `loads`, `function`,
    `graph`, `strategy`, `import`; in a function `parameter`, `option` and `statics`; in a strategy
    `expert_loads`.

    | op              | |
    |-----------------|-|
    | `stg.symbols`   | yes |
    | `stg.func`      | yes |
    | `stg.split`     | yes: any statement of a strategy |
    | `stg.yield` | no: it passes values on |
    """

    what: str = ""


class OpenParams(Trait):
    """The op takes parameters of any name, which it declares in text order. With `words` their
    values may be words as well as sizes.

    | op              | |
    |-----------------|-|
    | `stg.symbols`   | yes |
    | `stg.call`      | yes: words |
    | `stg.mesh`      | yes |
    | `stg.assume`    | no: one list of relations |
    """

    words: bool = False


class Named(Trait):
    """The op has a name, such as `@main`.

    | op              | |
    |-----------------|-|
    | `stg.mesh`      | yes |
    | `stg.func`      | yes |
    | `stg.symbols`   | no |
    """


# -- regions ---------------------------------------------------------------------------------------


class HasRegion(Trait):
    """The op has a region, operations in braces. The last one is a terminator, unless the op has
    the trait `Holds`.

    | op              | |
    |-----------------|-|
    | `stg.func`      | yes |
    | `stg.repeat`    | yes |
    | `stg.yield`     | no |
    """


class Holds(HasRegion, Named):
    """The region is a list of statements without results and without a terminator; `what` describes
    them. With `only`, each of them names this op as its parent.

    | op              | |
    |-----------------|-|
    | `stg.module`    | yes |
    | `stg.strategy`  | yes |
    | `stg.arena`     | yes, only `stg.buffer` |
    | `stg.func`      | no: it ends in a return |
    """

    what: str = ""
    only: bool = False


class Runs(HasRegion, Free, Stays):
    """The region runs as a part of the step, and passes values from one run to the next.

    | op              | |
    |-----------------|-|
    | `stg.action`    | yes |
    | `stg.repeat`    | yes |
    | `stg.func` | no: it is the step, or is inlined |
    """


class Conditional(HasRegion, Free, Stays):
    """The op is replaced by its region if options have the stated values, else by its operands.

    | op              | |
    |-----------------|-|
    | `stg.when`      | yes |
    | `stg.repeat`    | no: it runs in any case |
    """


class Repeats(Runs):
    """The region runs `count` times; the first `carry` values pass from one iteration to the next,
    the others are slices.

    | op              | |
    |-----------------|-|
    | `stg.repeat`    | yes |
    | `et.repeat`     | yes |
    | `stg.accumulate`| no: no value passes from one microbatch to the next |
    """


class Accumulates(Runs):
    """The region runs once per microbatch; the values that it yields are added up.

    | op              | |
    |-----------------|-|
    | `stg.accumulate`| yes |
    | `stg.repeat`    | no |
    | `et.accumulate` | no: nodes cannot be added |
    """


class Terminates(Free, Stays):
    """The op ends a region and passes its operands to the op around it.

    | op              | |
    |-----------------|-|
    | `stg.yield`     | yes |
    | `stg.return`    | yes |
    | `stg.free`      | no |
    """
