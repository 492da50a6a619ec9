"""Traits: what an op says of itself that algorithms ask for.

An op lists its traits (`traits = (View(),)`); `op.has(View)` asks for one. A trait that refines
another one brings it along: an op with `View` has `Free` too. The tables below are examples, each
row is compared with the built-in ops by a test.
"""

from __future__ import annotations

from dataclasses import fields

from stagec.support.frozen import Frozen


class Trait(Frozen):
    """Base of all traits. Prints as its name and what it says."""

    def __str__(self) -> str:
        said = [str(v) for v in (getattr(self, f.name) for f in fields(self)) if v]
        return type(self).__name__ + (f"({', '.join(said)})" if said else "")


# -- cost and order --------------------------------------------------------------------------------


class Free(Trait):
    """It costs nothing at run time: no node of a trace.

    | op              | |
    |-----------------|-|
    | `stg.reshape`   | yes: a view |
    | `stg.constant`  | yes |
    | `stg.repeat`    | yes: what is inside costs |
    | `stg.permute`   | no: it copies |
    | `stg.send`      | no |
    """


class Stays(Trait):
    """It does more than compute its results: nobody erases it if they are unused, or merges it with
    an equal op.

    | op              | |
    |-----------------|-|
    | `stg.gradient`  | yes: the optimizer's side of it is added later |
    | `stg.send`      | yes |
    | `stg.adamw`     | yes: it updates its operands |
    | `stg.all_gather`| no |
    """


class CopiesMemory(Trait):
    """It copies between memories, so its operand may be in host memory; all others compute with
    values on the device only.

    | op              | |
    |-----------------|-|
    | `stg.copy`      | yes |
    | `stg.permute`   | no: a copy on the device |
    """


class Fusible(Trait):
    """A compiler computes it in one kernel with its neighbours: an element of its results takes one
    or a few elements of each operand. With `rows` it takes a row along the last dimension.

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
    """It rotates rows by their positions. Engines rotate queries in the kernel that writes rotated
    keys into a cache.

    | op              | |
    |-----------------|-|
    | `stg.rope`      | yes |
    | `stg.swiglu`    | no |
    """


class AppendsRows(Trait):
    """It writes the rows of new tokens, its last operand, into a cache.

    | op              | |
    |-----------------|-|
    | `stg.append`    | yes |
    | `stg.concat`    | no: it copies all |
    """


# -- buffers ---------------------------------------------------------------------------------------


class View(Free):
    """Its results are views of operand 0.

    | op              | |
    |-----------------|-|
    | `stg.reshape`   | yes |
    | `stg.all_slice` | yes: the local part |
    | `stg.concat`    | no: it copies |
    | `stg.constant`  | no: it has no operand |
    """


class PartOfBuffer(View):
    """Each result is a view of its operand, in a buffer that all operands are parts of.

    | op              | |
    |-----------------|-|
    | `stg.part_of`   | yes |
    | `stg.reshape`   | no: it has one operand |
    """


class Recalls(Free):
    """Its result is operand 0 in the iterations that recompute, else operand 1.

    | op              | |
    |-----------------|-|
    | `stg.recall`    | yes |
    | `et.recall`     | yes |
    | `stg.reshape`   | no |
    """


class InPlace(Stays):
    """It updates operands: result i takes the buffer of operand `operands[i]`.

    | op              | |
    |-----------------|-|
    | `stg.adamw`     | yes |
    | `stg.all_reduce`| no: nobody else sees that its result takes the buffer of its operand |
    """

    operands: tuple[int, ...] = ()


class EndsLifetime(Trait):
    """The buffers of its operands end here. It does not use the values.

    | op              | |
    |-----------------|-|
    | `stg.free`      | yes |
    | `stg.reshard`   | no: a use, up to which gathered parameters live |
    """


# -- meaning ---------------------------------------------------------------------------------------


class Wide(Trait):
    """Autocast computes it in fp32 (the list `fp32` of `torch.autocast`).

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
    """The buffers of its results stay until the next op with this trait, or until backward ends.

    | op              | |
    |-----------------|-|
    | `stg.copy_in`   | yes: FSDP2 keeps the input of a reduce-scatter until that of the next unit |
    | `stg.copy`      | no |
    """


class KeepsPart(Trait):
    """Its results are parts of gathered parameters, which are gathered again as parameters are.

    | op              | |
    |-----------------|-|
    | `stg.keep_part` | yes |
    | `stg.all_slice` | no |
    """


class Recasts(Trait):
    """Its result is operand 0 in another element type.

    | op              | |
    |-----------------|-|
    | `stg.cast`      | yes |
    | `stg.scale`     | no |
    """


class Chooses(Trait):
    """Operand 0 are scores that it chooses by: they are not made coarser.

    | op              | |
    |-----------------|-|
    | `stg.route`     | yes: the experts of a token |
    | `stg.softmax`   | no |
    """


class PicksOne(Trait):
    """Its first result numbers one element of each row of operand 0, as a sampler does a token.

    | op              | |
    |-----------------|-|
    | `stg.argmax`    | yes |
    | `stg.route`     | no: several, with their weights |
    """


class TakesLogits(Trait):
    """Operand 0 are logits, of which it takes rows: a loss, or the first op of one.

    | op                  | |
    |---------------------|-|
    | `stg.cross_entropy` | yes |
    | `stg.log_softmax`   | yes |
    | `stg.nll_loss`      | no: log-probabilities |
    """


class FinalGradient(Trait):
    """Its operand is complete: the collectives that reduce and place it belong to phase gradient.

    | op              | |
    |-----------------|-|
    | `stg.gradient`  | yes |
    | `stg.adamw`     | no: it uses such gradients |
    """


class AddsToSum(Trait):
    """Its kernel adds operand 0 to a sum over microbatches, which the kernel that makes operand 0
    may do itself.

    | op                    | |
    |-----------------------|-|
    | `stg.accumulate_grad` | yes |
    | `stg.add`             | no: it makes a new value |
    """


class BeginsBackward(Trait):
    """The gradient of its operand comes from elsewhere, not from the loss.

    | op              | |
    |-----------------|-|
    | `stg.depart`    | yes: from the part of the model that gets it |
    | `stg.send`      | no |
    """


class Lowered(Trait):
    """It stands in a lowered graph, where values are nodes.

    | op              | |
    |-----------------|-|
    | `et.comp`       | yes |
    | `et.graph`      | yes |
    | `stg.einsum`    | no |
    """


# -- declarations ----------------------------------------------------------------------------------


class Declares(Free, Stays):
    """It states something and computes nothing. `what` lets the module find it: `symbols` and
    `axes` (its parameters are the names), `relations`, `order`, `layers`, `loads`, `function`,
    `graph`, `strategy`, `import`; in a function, `parameter`, `option` and `statics`; in a
    strategy, `expert_loads`.

    | op              | |
    |-----------------|-|
    | `stg.symbols`   | yes |
    | `stg.func`      | yes |
    | `stg.split`     | yes: any statement of a strategy |
    | `stg.yield`     | no: it hands values on |
    """

    what: str = ""


class OpenParams(Trait):
    """It takes parameters of any name: they are what it declares, in the order of the text. With
    `words` their values may be words beside sizes.

    | op              | |
    |-----------------|-|
    | `stg.symbols`   | yes |
    | `stg.call`      | yes: words |
    | `stg.mesh`      | yes |
    | `stg.assume`    | no: one list of relations |
    """

    words: bool = False


class Named(Trait):
    """It has a name, such as `@main`.

    | op              | |
    |-----------------|-|
    | `stg.mesh`      | yes |
    | `stg.func`      | yes |
    | `stg.symbols`   | no |
    """


# -- regions ---------------------------------------------------------------------------------------


class HasRegion(Trait):
    """Operations stand in braces behind it. The last one ends the region, unless it `Holds`.

    | op              | |
    |-----------------|-|
    | `stg.func`      | yes |
    | `stg.repeat`    | yes |
    | `stg.yield`     | no |
    """


class Holds(HasRegion, Named):
    """Its region is a list of statements without results and without an end; `what` says of which.
    With `only`, each of them names this op as its parent.

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
    """Its region runs as a part of the step; values are handed on from one run to another.

    | op              | |
    |-----------------|-|
    | `stg.action`    | yes |
    | `stg.repeat`    | yes |
    | `stg.func`      | no: nobody calls it |
    """


class Conditional(HasRegion, Free, Stays):
    """Its region stands in its place where options are as it says, else its operands.

    | op              | |
    |-----------------|-|
    | `stg.when`      | yes |
    | `stg.repeat`    | no: it runs in any case |
    """


class Repeats(Runs):
    """Its region runs `count` times; the first `carry` values go from one iteration to the next,
    the others are slices.

    | op              | |
    |-----------------|-|
    | `stg.repeat`    | yes |
    | `et.repeat`     | yes |
    | `stg.accumulate`| no: no value goes from one microbatch to the next |
    """


class Accumulates(Runs):
    """Its region runs once for each microbatch; what it yields is added up.

    | op              | |
    |-----------------|-|
    | `stg.accumulate`| yes |
    | `stg.repeat`    | no |
    | `et.accumulate` | no: nodes cannot be added |
    """


class Terminates(Free, Stays):
    """It ends a region and hands its operands to the op around it.

    | op              | |
    |-----------------|-|
    | `stg.yield`     | yes |
    | `stg.return`    | yes |
    | `stg.free`      | no |
    """
