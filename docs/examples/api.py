"""One example for each name of `stagec.api`, in the order of docs/reference/api.

`make docs` runs them one after the other and shows them with what they print. A line `# == TITLE`
begins a part of the page, a line `# -- NAME, NAME: REMARK` an entry.
"""

from stagec.api import *

# == Texts and modules: A text is read with the ops that are known, and printed back.
# -- load_plugins, Loaded
loaded = load_plugins()  # and plug-in files: load_plugins(["my.py"])
loaded.pipelines["place"]
loaded.passes["bind"].__name__

# -- Source
block = Source(
    "block.stg",
    """stg.module @block {
  stg.symbols[B, D, F = 64]
  stg.assume[F % tp == 0]
  stg.mesh @pod[dp = 2, tp]
  stg.func @f(%x: bf16[B, D], %w: bf16[D, F@tp | param]) {
    %u = stg.einsum["bd,df->bf"](%x, %w)
    %m = stg.gelu(%u)
    stg.return(%m)
  }
}
""",
)
block.line(6)

# -- parse_module, Module
module = parse_module(block, loaded.registry)
module.name, module.phase, module.symbols
[op.name for op in module.walk()]
module.parameters()

# -- Mesh
module.mesh
module.mesh.axes

# -- print_module, print_op
print(print_op(module.main.body.ops[0]))
text = print_module(module)
print_module(parse_module(Source("again.stg", text), module.registry)) == text

# -- verify_module
verify_module(module)

# == Operations: The part of a module that passes change. `Operation` and `Value` stand for what is written, a `Builder` makes more of it.
# -- Operation
einsum, gelu, end = module.main.body.ops
einsum.name, einsum.operands, einsum.text("spec"), einsum.phase
gelu.position(), gelu.parent_op.name, gelu.definition.operands
einsum.loc

# -- Value
u = einsum.result
u.name, u.producer is einsum, u.uses == [(gelu, 0)]
PassManager(loaded.pipeline("infer-shapes")).run(module)
str(u.type), u.tensor.shape

# -- Region
module.main.body.args
module.main.body.terminator.name

# -- Builder
b = module.before(gelu)
half = b.value("stg.scale", [u], {"by": const(1) / 2}, hint="half")
gelu.set_operand(0, half)
for op in module.main.body.ops:
    print(print_op(op))

# -- Attr: What a parameter of an op may hold: True (a flag), a name, an Expr, a Relation, a SymbolRef, a Quoted, or a tuple of these.
einsum.attrs

# -- Quoted, SymbolRef
str(Quoted("bd,df->bf")), str(SymbolRef("pod"))

# -- Registry
sorted(op.name for op in module.registry if op.name.startswith("stg.max"))
module.registry["stg.gelu"].example

# == Types and sizes: Types are immutable; sizes are expressions, exact and symbolic.
# -- Type, TensorType: A TensorType or an OpaqueType.
type_ = module.main.body.args[1].tensor
type_.dtype, type_.role, type_.local_shape, type_.local_bytes
str(type_.with_splits([("dp",), ("tp",)]))

# -- Dim, AxisUse
type_.dims[1].size, type_.dims[1].axes, type_.dims[1].split

# -- Load
str(Dim(symbol("C"), load=Load("E"))), Dim(symbol("C"), load=Load("E")).local

# -- Partial
str(type_.with_splits([(), ()], Partial("sum", ("tp",))))

# -- OpaqueType
str(OpaqueType("node"))

# -- Expr, symbol, const, as_expr
size = symbol("B") * symbol("D") * 2 + const(0)
size, as_expr(7), size / symbol("tp")
sorted(size.symbols), const(7).value, symbol("B").symbol_name

# -- product, total, call
product([symbol("B"), const(4)]), total([symbol("B"), symbol("B")])
call("ceildiv", [symbol("B"), const(8)]), call("min", [const(3), const(5)])

# -- evaluate
evaluate(size, {"B": 8, "D": 64})

# -- axis_size
axis_size(["dp", "tp"])

# -- Relation, Facts
facts = Facts([Relation(symbol("F"), "==", const(0), modulus=symbol("tp"))])
facts.divides(symbol("tp"), symbol("F") * 3), facts.divides(symbol("dp"), symbol("F"))

# == Passes: A pass changes a module between two phases; a plug-in brings passes, ops, pipelines and schedules.
# -- Pass


class CountOps(Pass):
    """Remark how many ops there are of a name."""

    name = "count-ops"
    needs, until = Phase.PARSED, Phase.PLANNED
    of: str = "stg.einsum"

    def run(self, module: Module) -> None:
        module.diagnostics.remark(f"{sum(op.name == self.of for op in module.walk())} {self.of}")


CountOps.from_options({"of": "stg.gelu"})

# -- Phase
[phase.label for phase in Phase]
Phase.SHAPED <= Phase.SHARDED

# -- Plugin
PLUGIN = Plugin(name="mine", passes=(CountOps,), pipelines={"count": "infer-shapes,count-ops"})

# -- PassManager
again = parse_module(block, loaded.registry)
PassManager([*loaded.pipeline("place").passes, CountOps()]).run(again)
again.phase, again.diagnostics.items[0].message

# -- Pipeline, parse_pipeline, print_pipeline
known = {**loaded.passes, CountOps.name: CountOps}
pipeline = parse_pipeline(
    "place,+after(infer-shapes):count-ops{of=stg.gelu}", known, loaded.pipelines
)
print_pipeline(pipeline.passes)


# -- Instrument, Hooks
class Tell(Hooks):
    def after_pass(self, pass_: Pass, module: Module) -> None:
        print(f"{pass_.name} gives {module.phase}")


PassManager(loaded.pipeline("place"), [Tell()]).run(parse_module(block, loaded.registry))


# == Ops: An op is one class. Only what differs from the base needs to be stated.
# -- OpDef
class Relu(OpDef):
    """max(x, 0), one comparison per element."""

    name = "my.relu"
    operands = ("x",)
    index = IndexRule("...->...")
    flops_per_point = 1
    example = "%y = my.relu(%x) : bf16[B]"


loaded.registry.add(Relu())
print_op(Builder.before(loaded.registry, end).op("my.relu", gelu.results, names=["r"]))

# -- Param
Param("gather", "name", "the factor that it gathers", required=True)
module.registry["stg.scale"].params

# -- traits: A module: what an op says of itself. [The reference](../ops/traits.md) lists them, with examples.
module.registry["stg.repeat"].traits, module.registry["stg.repeat"].has(traits.Free)
gelu.has(traits.View), end.has(traits.Terminates)

# -- Rule, make_rule
rule = make_rule("bs(gr)k,bztgk->bs(gr)k", whole="zk", special="t")
rule.factors, sorted(rule.contracted(0)), list(rule.occurrences("g"))

# -- IndexRule: What a class states as `index`.
IndexRule("...d,df->...f").of(einsum).results

# -- letters
letters(3)

# -- factor_sizes, Sizes: The size of each factor of a rule, by its letter.
factor_sizes(einsum, einsum.definition.rule(einsum))
factor_sizes(einsum, einsum.definition.rule(einsum), local=True)

# -- Grads: What `grad` takes and gives: gradients, None where none flows.
grads: Grads = [gelu.result, None]

# -- Splits: What `partition` gets: the axes over which special factors are split.
special: Splits = {"v": ("tp",)}

# -- NumericContext
ctx = NumericContext(env={"S": 8, "tp": 2}, coords={"tp": 1})
ctx.size(symbol("S")), list(ctx.positions(Dim(symbol("S"), (AxisUse("tp"),))))

# -- Array: What `reference` takes and gives: numpy arrays.
[round(float(y), 3) for y in module.registry["stg.gelu"].reference(gelu, ctx, -0.5)]

# -- place_from_operands
place_from_operands(einsum, module.facts)
str(einsum.result.type)

# -- is_parameter
[is_parameter(v) for v in einsum.operands]


# == Statements: A statement of a strategy is a record of what it says, which passes read, and an op.
# -- Record, parameter
class Pause(Record):
    """After which layer ranks wait."""

    layer: int = parameter("int", "the layer", required=True, least=0)


# -- Statement
class PauseOp(Statement):
    """All ranks wait for each other after a layer."""

    name, record = "my.pause", Pause


loaded.registry.add(PauseOp())

# -- read_strategy, Strategy
laid_out = parse_module(
    Source("s.stg", "stg.module @m { stg.strategy @s { my.pause[layer = 3] } }"), loaded.registry
)
strategy = read_strategy(laid_out)
strategy.one(Pause).layer, strategy.zero

# == Diagnostics: An error says where, what was expected and found, and what to do. Raise it, or collect several.
# -- error, DiagnosticError
try:
    raise error(
        "expected a gelu, found %u", einsum.loc, remedy="put the pass behind the first gelu"
    )
except DiagnosticError as e:
    print(e.diagnostics[0].message, "-", e.diagnostics[0].remedy)

# -- Diagnostic, note
warning = Diagnostic("two meshes", severity="warning", notes=(note("the first one", gelu.loc),))
warning.notes[0].message

# -- DiagnosticList
problems = DiagnosticList()
problems.error("no mesh", module.root.loc)
len(problems.errors)  # problems.check() raises them all

# -- Loc, FileLoc, NameLoc, made_by: A FileLoc, a NameLoc around one, or unknown.
gelu.loc
made_by("my-pass", gelu.loc)


# == Schedules: The order of a pipeline's actions, as `--schedule NAME` takes it.
# -- Schedule, Action
class AllForward(Schedule):
    name, summary = "all-forward", "all forwards, then all backwards"

    def rank_actions(self, rank, stages, microbatches, chunks):
        yield from (Action("F", 0, i) for i in range(microbatches))
        yield from (Action("B", 0, i) for i in range(microbatches))


[str(action) for action in AllForward().actions(stages=2, microbatches=1, chunks=1)[0]]

# -- Placement, StageChunk
AllForward().placement(stages=2, chunks=1).homes

# == Figures of many jobs: A text is compiled once for all sizes and degrees for which a compile would decide alike.
# -- Family
job = Source(
    "job.stg",
    """stg.module @job {
  stg.symbols[B = 64, D = 1024, F = 4096]
  stg.mesh @pod[dp = 8, tp = 4]
  stg.strategy @s {
    stg.split[B, over = dp]
    stg.split[F, over = tp]
  }
  stg.func @f(%x: bf16[B, D], %w: bf16[D, F | param], %v: bf16[F, D | param]) -> f32[] {
    %h = stg.einsum["bd,df->bf"](%x, %w)
    %y = stg.einsum["bf,fd->bd"](%h, %v)
    %s = stg.sum["bd->"](%y)
    %l = stg.cast[f32](%s)
    stg.return(%l)
  }
}
""",
)
family = Family(job, loaded.registry, loaded.pipeline("train"))
sizes = {"B": 64, "D": 1024, "F": 4096, "dp": 8, "tp": 4}
family.at(sizes).flops
[family.at({**sizes, "tp": tp, "B": 64 * tp}).peak for tp in (1, 2, 4, 8)]
len(family)  # how often it was compiled: without tp, and with it

# -- Figures
figures = family.at(sizes)
figures.ranks, figures.parameters, figures.sent, figures.peak
dict(figures.memory)

# == Time: What `stagec time` reports, for programs.
# -- time_step, TimeReport
found = time_step("llama3-8b", "h100-sxm", tp=4, dp=2, sizes={"L": 4}, zero=1)
round(found.step_seconds, 3), round(found.mfu, 2), found.slowest
{part: f"{time / found.step_seconds:.0%}" for part, time in list(found.breakdown.items())[:3]}
wider = [time_step("llama3-8b", "h100-sxm", tp=tp, sizes={"L": 4}) for tp in (1, 2, 4)]
[round(each.step_seconds, 3) for each in wider]


# == Formats: From the program of a rank class to the bytes of any of its ranks, as `--format NAME` takes it.
# -- Format, Program, Node, GroupAxes, Layout
class Names(Format):
    name, suffix = "names", "txt"

    def encoder(self, program, layout, durations):
        self.program = program  # an encoder has one method
        return self

    def rank(self, rank):
        return "\n".join(node.name for node in self.program.nodes).encode()


Names().suffix, Names().patched

# -- PatchedEncoder, Variant: See `stagec/formats/chakra`.
PatchedEncoder.__name__, [field for field in Variant.__dataclass_fields__][:3]


# -- JobFormat, TraceJob, Estimate, all_ranks
class Classes(JobFormat):
    name = "classes"

    def drops(self, program, layout):
        return ["the order of nodes is not written"]

    def files(self, job, ranks):
        all_ranks(self, ranks)
        yield f"{job.name}.classes.txt", (self.line(job, i) for i in range(len(job.members)))

    def estimate(self, job, ranks):
        return Estimate(40 * len(job.members), "a line for each class")

    def line(self, job, number):
        return f"{len(job.members[number])} ranks: {len(job.program(number))} nodes\n".encode()


Classes().drops(None, None), all_ranks(Classes(), None)

# == Families of models: From a configuration to the text that it means, as `stagec import` does. See [models.md](../../models.md).
# -- ModelText, Body, Callee
text = ModelText("square", "The square of a vector.")
body = Body()
y = body.let("y", 'stg.einsum["d,d->"](%x, %x)', "the sum of squares")
body.do(f"stg.return({y})")
text.symbol("D", 64, "hidden_size"), text.symbol("L", 2)
print(text.use("mlp", "D F", "bias").with_("F = 4*D"), Callee("f"))
print(text.train("%x: f32[D]", body).text())


# -- Config, ModelFamily
def read_double(config: Config) -> ModelText:
    """Write the model that a configuration means."""
    text.symbol("D", config.size("hidden_size", default=64), "hidden_size")
    return text


double = ModelFamily("Double", ("double",), read_double, "a sum")
Plugin(name="double", families=(double,)).families[0].model_types

# == Serving: Requests to a server, and policies that say which of them each step serves.

# -- Request
Request(arrival=1_000_000_000, prompt=512, output=128).prompt


# -- BatchingPolicy, ServerState, StepPlan
class OneByOne(BatchingPolicy):
    name = "one-by-one"
    summary = "a request at a time, in one chunk"

    def plan(self, state: ServerState) -> StepPlan:
        chosen = [*state.running, *state.waiting][:1]
        return StepPlan([(live, min(live.left, state.limits.tokens)) for live in chosen])


Plugin(name="mine", policies=(OneByOne(),)).policies[0].name

# -- LiveRequest, ServerLimits
limits = ServerLimits(tokens=2048, sequences=8, blocks=1000, block=16)
state = ServerState([], [LiveRequest(Request(0, 512, 128), 1)], limits, limits.blocks)
[(live.number, tokens) for live, tokens in OneByOne().plan(state).work], limits.blocks_for(512)
