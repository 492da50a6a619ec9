"""plan-memory: makes lifetimes of buffers explicit and states the bytes of each category on one
rank.

Gradient buffers persist through the whole step, as in frameworks with persistent gradient buffers;
if the strategy frees them, they exist from backward on. The peak is the static state plus the
highest moment of all other buffers.
"""

from stagec.api import Builder, Module, Operation, Pass, Phase, Region, Value, made_by, total
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import carried
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.pipeline import ACTIONS
from stagec.memory.buffers import STASH, Buffer
from stagec.memory.liveness import Roots, last_users, value_bytes
from stagec.memory.plan import FunctionPlan, by_name
from stagec.memory.step import ActionInState, after_work, first_run, first_runs, is_first_run
from stagec.memory.worst import on_device, on_host, total_of, worst_of


class PlanMemory(Pass):
    """Insert `stg.free` where buffers end, and a `stg.memory` that states the bytes of each
    category.

    Before:
        stg.func @f(%x: bf16[B, F | rep]) {
          %a = stg.gelu(%x) : bf16[B, F | rep]
          %b = stg.gelu(%a) : bf16[B, F | rep]
          %c = stg.gelu(%b) : bf16[B, F | rep]
          stg.return(%c)
        }
    After:
        stg.func @f (%x: bf16[B, F | rep]) {
          %a = stg.gelu(%x) : bf16[B, F | rep]
          %b = stg.gelu(%a) : bf16[B, F | rep]
          stg.free(%a)
          %c = stg.gelu(%b) : bf16[B, F | rep]
          stg.free(%b)
          stg.return(%c)
        }
        stg.memory[parameters = 0, gradients = 0, optimizer = 0, stash = 0,
            transient = 4*B*F, peak = 4*B*F]
    """

    needs = Phase.PARTITIONED
    gives = Phase.PLANNED

    def run(self, module: Module) -> None:
        plan_memory(module)


def plan_memory(module: Module) -> None:
    """Insert `stg.free` after the last user of each buffer and a `stg.memory` with the bytes on one
    rank."""
    for func in module.functions:
        _Plan(module, func).state()


def _is_transient(buffer: Buffer) -> bool:
    return on_device(buffer) and buffer.category != STASH


class _Plan:
    """Writes the plan of one function into the module."""

    def __init__(self, module: Module, func: Operation) -> None:
        self._module, self._func, self._body = module, func, func.body
        self._plan = module.notes[func.body] = FunctionPlan(module, func)
        self._env, self._planner, self._sets = self._plan.env, self._plan.planner, self._plan.sets
        counts = (op.expr("count") for op in self._body.walk() if op.has(Repeats))
        axes = module.mesh.axes if module.mesh else ()
        self._long = frozenset(n for c in counts for n in c.symbols) - frozenset(axes)

    def state(self) -> None:
        """Add the statements of the plan to the module."""
        loc = made_by(PlanMemory.name, self._func.loc)
        b, attrs = Builder(self._module.registry, self._module.root.body, loc=loc), self._whole()
        if self._plan.staged:
            stages = self._func.attrs["stages"]
            attrs |= {"stages": stages, "around": total_of(self._planner.around())}
        keep = self._sets.gradients | self._sets.static
        keep |= set[Value]() if self._func.flag("spent") else self._sets.freed
        _insert_frees(self._module, self._body, keep, self._plan.roots)
        b.op("stg.memory", (), attrs, types=())
        for work in self._plan.works():
            b.op("stg.working", (), self._of_work(work), types=())

    def _whole(self) -> dict[str, RawAttr]:
        """The attributes of `stg.memory`. If the function has actions, they cover the step around
        these."""
        parts, outside = self._plan.parts(), self._planner.run(None)
        runs = [*self._planner.alone(), outside]
        plan: dict[str, RawAttr] = {
            **parts,
            "stash": total(value_bytes(v) for v in by_name(self._sets.stash)),
            "transient": worst_of(runs, self._env, self._long, _is_transient),
            "peak": total(parts.values()) + worst_of([outside], self._env, self._long),
        }
        host = self._plan.host()
        return plan | ({"host": host} if host != 0 else {})

    def _of_work(self, work: ActionInState) -> dict[str, RawAttr]:
        """The attributes of `stg.working` for actions that run one after the other."""
        runs, before = work
        regions = [r for r in runs if not is_first_run(r)]
        firsts = tuple(kind for kind, c in regions if first_run((kind, c)) in runs)
        peak = worst_of([self._planner.run(work)], self._env, self._long)
        now, then = self._planner.kept(before), self._planner.kept(after_work(work))
        sums = tuple(total_of(self._planner.kept(s)) for s in first_runs(work))
        new, gone = then - now, now - then
        left, host = (total_of(new, w) - total_of(gone, w) for w in (on_device, on_host))
        done = {kind: tuple(sorted(c for k, c in before if k == kind)) for kind in ACTIONS}
        return {
            "runs": tuple(kind for kind, _ in regions),
            "chunk": runs[0][1],
            **({"first": firsts, "sums": sums} if sums else {}),
            **{kind: chunks for kind, chunks in done.items() if chunks},
            "peak": peak,
            "left": left,
            **({"host": host} if host != 0 else {}),
            "stages": self._func.attrs["stages"],
        }


def _insert_frees(module: Module, body: Region, keep: set[Value], roots: Roots) -> None:
    """Add one `stg.free` after each op with the buffers that end there."""
    users = last_users(body, roots)
    keep |= {a for region in users for a in region.args[carried(region.owner) :]}
    dying: dict[Operation, list[Value]] = {}
    for region, last in users.items():
        for value, user in last.items():
            if value not in keep and user is not region.terminator and roots(value) is value:
                dying.setdefault(user, []).append(value)
    for op, values in dying.items():
        module.after(op).op("stg.free", values, types=())
