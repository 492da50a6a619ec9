"""Activations that backward recomputes."""

import re
from collections.abc import Iterator
from typing import Any

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.flag_values import FlagValues, Problems, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

RECOMPUTE = ("none", "selective", "full", "full_replay")
#: `recompute_modules` of Megatron-Core: core/transformer/transformer_config.py.
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


_NAME = re.compile(r"[A-Za-z_][\w.]*")


def _number(name: str, doc: str, help: str, needs: str = "recompute") -> Any:
    name = f"recompute_{name}"
    return flagged(name, help, "int", doc=doc, least=1, needs=(needs,), rare=True)


class RecomputeRule(Record):
    """The activations that backward recomputes: by policy, or the results of these ops; in all
    blocks, in the first `layers`, or in every `every`-th."""

    policy: str = parameter(
        "name",
        "none, selective, full or full_replay",
        positional=True,
        choices=RECOMPUTE,
        flag=Flag(
            "recompute",
            "Activations that backward recomputes: by policy, or the results of these ops.",
            "text",
            metavar="none|selective|full|full-replay|OP,...",
            tries=("none", "selective", "full"),
        ),
    )
    ops: tuple[str, ...] = parameter(
        "names", "ops whose results are computed again, as in (attention, swiglu)"
    )
    keep: tuple[str, ...] = parameter(
        "names",
        "of full: ops whose results are kept all the same, as in (einsum, attention)",
        flag=Flag(
            "recompute_keep",
            "With --recompute full: save the results of these ops, even if backward does not "
            "read them; for einsum those of matrix products in 16 bits or more, not of experts.",
            "names",
            "",
            metavar="OP,...",
            needs=("recompute",),
            rare=True,
        ),
    )
    products: int = _number(
        "products",
        "of keep: every n-th matrix product of a block is computed again",
        "With --recompute-keep: recompute every N-th matrix product of a block (0: none).",
        "recompute_keep",
    )
    modules: tuple[str, ...] = parameter(
        "names",
        f"of selective: modules with checkpoints of their own, {', '.join(MODULES)}",
        flag=Flag(
            "recompute_modules",
            "With --recompute selective: the modules of a block with checkpoints of their own, as "
            "in recompute_modules of Megatron-Core.",
            "names",
            "",
            metavar="MODULE,...",
            needs=("recompute",),
            rare=True,
        ),
    )
    layers: int = _number(
        "layers",
        "only in this many first blocks",
        "Recompute in the first N layers of each stage only (0: in all).",
    )
    every: int = _number(
        "every", "only in every n-th block", "Recompute in every N-th layer only (0: in all)."
    )


class RecomputeOp(Statement):
    """The activations of a block that backward recomputes instead of reading them from the stash.

    `selective`: activations that grow with the square of a dimension, such as attention scores.
    `full`: all except the inputs of the blocks; operations that backward does not need are not
    recomputed. `full_replay`: the whole block, as published formulas count. `ops` names instead the
    ops whose results are not stashed. With `keep` and `full`, the results of these ops are kept,
    even if backward does not read them (except by a compiler of blocks, `stg.fusion[elementwise]`),
    and every `products`-th matrix product is recomputed: `einsum, attention` and 2 correspond to
    torchtitan's selective checkpoints of ops (`_save_list`, `_apply_op_sac`). `einsum` are products
    in 16 bits or more (`aten.mm`); those in 8 bits (`aten._scaled_mm`) are recomputed.

    `modules` are ranges of a block, whatever their text calls them: a kernel of attention, norms of
    the block's width, what latent attention computes of its latent vectors, feed-forward blocks,
    experts with their router, the activations of experts, and shared experts. `core_attn`, `mlp`,
    `moe` and `shared_experts` keep what they return (megatron/core/tensor_parallel/random.py:
    `checkpoint`), the others drop it, make it again when the gradient of the operation that used
    it last is complete, and copy it to where it was (`CheckpointWithoutOutput`). `layers`
    recomputes only in the first blocks of each stage (Megatron-LM's method `block`), `every` in
    every n-th block (as torchtitan does); other blocks stash all activations.
    """

    name, record = "stg.recompute", RecomputeRule
    section = Section.MEMORY
    training = "there is no backward to compute again for"
    example = "stg.recompute[full, layers = 4]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if ("policy" in op.attrs) == ("ops" in op.attrs):
            yield "expects either a policy or a list of ops"
        if "keep" in op.attrs and op.text("policy") != "full":
            yield "'keep' needs the policy 'full', from which it takes ops out"
        if "products" in op.attrs and "keep" not in op.attrs:
            yield "'products' needs 'keep', which names the products that are kept"
        if "modules" in op.attrs and op.text("policy") != "selective":
            yield "'modules' needs the policy 'selective'"
        for name in op.names("modules"):
            if name not in MODULES:
                yield f"'{name}' is not a module: expects {', '.join(MODULES)}"
        if "layers" in op.attrs and "every" in op.attrs:
            yield "'layers' and 'every' cannot be used together"
        for name in ("layers", "every"):
            if name in op.attrs and op.text("policy") == "none":
                yield f"'{name}' has no effect, since nothing is recomputed"

    def from_flags(self, request: FlagValues) -> Statements:
        if request["recompute"] != "none":
            names = _names(request)
            is_policy = names[0] in RECOMPUTE
            what = {"policy": names[0]} if is_policy else {"ops": names}
            yield {**what, **self.flag_values(request)}

    def flags_of(self, op: Operation) -> dict[str, Any]:
        policy = op.text("policy").replace("_", "-")
        return {"recompute": policy or ",".join(op.names("ops")), **super().flags_of(op)}

    def problems(self, request: FlagValues) -> Problems:
        if request["recompute_keep"] and request["recompute"] not in ("none", "full"):
            message = f"--recompute-keep needs --recompute full, found {request['recompute']}"
            yield message, "choose --recompute full"
        if request["recompute_modules"] and request["recompute"] not in ("none", "selective"):
            message = (
                f"--recompute-modules needs --recompute selective, found {request['recompute']}"
            )
            yield message, "choose --recompute selective"
        unnamed = [n for n in _names(request) if not _NAME.fullmatch(n)]
        if unnamed:
            message = (
                f"--recompute {request['recompute']}: '{unnamed[0]}' is neither a policy nor an op"
            )
            policies = ", ".join(RECOMPUTE)
            yield message, f"choose {policies}, or ops of the model, such as silu,multiply"


def _names(request: FlagValues) -> tuple[str, ...]:
    """A policy of recompute, or names of ops."""
    given: str = request["recompute"]
    policy = given.replace("-", "_")
    return (policy,) if policy in RECOMPUTE else tuple(n.strip() for n in given.split(","))
