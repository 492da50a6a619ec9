"""The flags of a job in Python calls; `make docs` writes this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class JobFlags(TypedDict, total=False):
    """What `stagec compile --help-all` describes; a flag that is None is not given."""

    #: A published run: model, sizes, mesh and strategy ('stagec presets' lists them).
    preset: str | None
    #: Sizes of symbols; B is the global batch in sequences.
    sizes: str | Mapping[str, int | None] | None
    #: The software that runs the job, as defaults of a strategy: ideal, or one of 'stagec stacks',
    #: or a file.
    stack: str | None
    #: Mesh axes, slowest first: pp=2,dp=4,tp=8 (a name alone is left open).
    mesh: str | Mapping[str, int | None] | None
    #: All ranks: fills in the axis left open (--dp if no --mesh), or checks their product.
    ranks: int | None
    #: Compile a step of serving instead of a training step.
    serve: Literal["prefill", "decode", "mixed", "disaggregated"] | None
    #: Sequences of the step, of all ranks together; of a mixed step those that decode, of each
    #: group of ranks that has requests of its own.
    batch: int | None
    #: New tokens of each sequence of prefill; of mixed, the prompt that --chunk ends.
    prompt: int | None
    #: Tokens of each sequence that are cached before the step.
    context: int | None
    #: Of prefill and mixed steps: tokens of the prompt per step (chunked prefill).
    chunk: int | None
    #: Of decode: draft tokens per sequence and step.
    speculative: int | None
    #: Of mixed: what the step holds, such as decode=64x4096,prefill=1x2048+0 (sequences x new
    #: tokens + cached ones; chunk= samples none, verify= all).
    step: str | None
    #: Of --serve disaggregated: the strategy of the pod for prefill, 'tp=4,sp'.
    prefill: str | None
    #: Of --serve disaggregated: the strategy of the pod for decode, 'tp=4,sp'.
    decode: str | None
    #: Of --serve: caches have whole pages of this number of tokens.
    page: int | None
    #: Of --serve: the element type of cached keys and values (default: as they are made).
    kv_dtype: Literal["bf16", "fp8", "int8"] | None
    #: Of --serve: how tokens are chosen by logits that are split over the vocabulary: the logits
    #: are gathered, as engines do it (default), or the maxima of ranks (local); none returns
    #: logits.
    sampling: Literal["gather", "local", "none"] | None
    #: Of decode: the model that makes the --speculative drafts, in a pod of its own: 'llama3-8b:
    #: tp=2'; 'llama3-8b[L=4]: tp=2' gives it sizes, 'llama3-8b: on=model' the ranks of its model.
    draft: str | None
    #: Data-parallel ranks.
    dp: int | None
    #: Tensor-parallel ranks.
    tp: int | None
    #: Pipeline stages.
    pp: int | None
    #: Pipeline schedule; 'stagec schedule' lists them.
    schedule: str | None
    #: Parts of the model per stage (default: the schedule's own).
    chunks: int | None
    #: Layers of each part of the model, first to last: 7,8*14,7 (default: evenly).
    stage_layers: str | Sequence[int] | None
    #: Tensor-parallel ranks send a part each of what they hold alike to the next stage, which
    #: gathers it.
    scatter_gather: bool | None
    #: Buffers for the messages of a pipeline: from arrival to last use (arrive), or one for each
    #: microbatch from step to step (ahead).
    stage_receives: Literal["arrive", "ahead"] | None
    #: What a pipeline stage returns stays until it is sent, until the backward of its microbatch
    #: ends (backward), or also, of the last stage, until the step ends (step).
    stage_results: Literal["sent", "backward", "step"] | None
    #: The gradient that a pipeline stage sends stays until it is sent, or until that of the next
    #: microbatch is there, where a rank has one part of the model (next).
    stage_gradients: Literal["sent", "next"] | None
    #: HSDP: replicas of the shard groups.
    dp_replicate: int | None
    #: HSDP: ranks of a shard group.
    dp_shard: int | None
    #: Context-parallel ranks.
    cp: int | None
    #: How attention sees the whole sequence.
    cp_mode: Literal["ring", "ulysses", "all-gather"] | None
    #: How the sequence lies on the ranks of a ring; zigzag balances the causal mask.
    cp_order: Literal["zigzag", "plain"] | None
    #: --cp-mode all-gather: gather keys and values again in backward, or keep them.
    cp_inputs: Literal["regather", "save-gathered"] | None
    #: Ring attention as one kernel (fused), or operation by operation as PyTorch's
    #: context_parallel: with keys and values of all ranks in one buffer (gathered), or passed on.
    ring_steps: Literal["fused", "gathered", "passed"] | None
    #: Expert-parallel ranks, some of the data-parallel ones.
    ep: int | None
    #: Ranks that split each expert: as many as tp, or 1. 0, the default, is 1 where --ep takes
    #: ranks of tp, else as many as tp.
    etp: int | None
    #: Rows of the expert buffers over those of balanced load, such as 5/4.
    capacity_factor: float | str | None
    #: How many tokens the experts take: JSON, a list, or a list for each layer; or such a list
    #: itself.
    expert_load: str | Path | Sequence[int] | Sequence[Sequence[int]] | None
    #: Whether each expert is as likely as any other, or some are chosen more often (spread): then
    #: few tokens reach fewer of them.
    expert_popularity: Literal["even", "spread"] | None
    #: Of the share of products, what grouped products of experts keep, such as 1/2: all if it is
    #: left out.
    sustained_experts: float | str | None
    #: Of a step of serving: so many more experts than the model has, copies of those that many
    #: tokens choose.
    redundant_experts: int | None
    #: Axes of the mesh, slowest first, in the places that they have among the others: dp,pp has
    #: pipeline stages as neighbours (default: pp, dp, ep, cp, tp).
    mesh_order: str | Sequence[str] | None
    #: Sequence parallelism between the blocks, over tp.
    sp: bool | None
    #: Of --serve: split the sequences between the blocks over tp, for whole experts.
    dp_attention: bool | None
    #: ZeRO stage over dp; 3 is FSDP.
    zero: int | None
    #: ZeRO-3: drop gathered parameters after forward, of all blocks but the last, or not.
    reshard_after_forward: Literal["always", "never", "last"] | None
    #: ZeRO-3: gather parameters this many blocks ahead.
    fsdp_prefetch: int | None
    #: ZeRO-1: gather updated parameters beside the forward of the first microbatch, block by block,
    #: in place of behind their update.
    overlap_param_gather: bool | None
    #: ZeRO-3: parameters outside of blocks are one unit, gathered from forward to the end of
    #: backward (root), or those before the blocks and those behind them are two (ends): the first
    #: is dropped after forward and gathered again for its backward.
    shard_units: Literal["root", "ends"] | None
    #: ZeRO-3: the loss is computed inside the module that is sharded, so what the last block
    #: gathered is there until the loss is, and backward begins with the gather of that block
    #: (inside), or behind it (outside).
    shard_loss: Literal["outside", "inside"] | None
    #: ZeRO-3: gradients of a unit are copied into a buffer that is reduced, and stays until that of
    #: the next unit is made, as FSDP2 does it.
    shard_copies: bool | None
    #: ZeRO: parameters that the ranks do not divide are whole (none), or filled up to equal shards:
    #: of the first dimension of the weight as PyTorch has it, which is that of its outputs (dim0),
    #: or of all of its elements (flat).
    shard_padding: Literal["none", "dim0", "flat"] | None
    #: Microbatches whose gradients are accumulated (default: 1, or 2 per pipeline stage).
    microbatches: int | None
    #: Gather the logits instead of a vocabulary-parallel loss.
    no_vocab_parallel: bool | None
    #: Gather inputs of split matmuls again in backward, or keep them.
    tp_inputs: Literal["regather", "save-gathered"] | None
    #: Split products wait for inputs that are gathered (whole), or work beside the gather on the
    #: parts that are there (in-steps).
    tp_gathers: Literal["whole", "in-steps"] | None
    #: Gathered inputs stay until the last product that takes them, or until the module of these
    #: products has its output.
    tp_inputs_until: Literal["product", "module"] | None
    #: Sums of split products run behind the product (whole), or part by part beside the rest of it
    #: (in-steps).
    tp_outputs: Literal["whole", "in-steps"] | None
    #: Let computations overlap collectives of tensor parallelism, but for data, or not.
    async_tp: bool | None
    #: Element-wise computations that follow each other run as one kernel: without norms and softmax
    #: (pointwise), with them (elementwise), also behind a matrix product (epilogue), or each by
    #: itself.
    fusion: Literal["none", "pointwise", "elementwise", "epilogue"] | None
    #: Matrix products add weight gradients to the sum over microbatches themselves.
    fuse_gradients: bool | None
    #: Matrix products of one operand with several weights, as those of queries, keys and values,
    #: are one product.
    fuse_products: bool | None
    #: Of serving: rotations of queries and keys, casts and the writing of rows into caches are one
    #: kernel.
    fuse_caches: bool | None
    #: Casts to so many bits or less are kernels of their own, not one with the norm or the
    #: activation before them.
    own_casts: int | None
    #: Parameters and activations.
    param_dtype: Literal["f32", "bf16", "f16"] | None
    #: Gradients; param: in the type of their parameter.
    grad_dtype: Literal["f32", "bf16", "f16", "param"] | None
    #: Gradients on the wire.
    reduce_dtype: Literal["f32", "bf16", "f16", "param", "compute"] | None
    #: The optimizer's copy of the parameters; none: it has no copy.
    master_dtype: Literal["f32", "bf16", "f16", "none"] | None
    #: What ZeRO-3 gathers, and computes with: parameters of another type are cast where they are
    #: gathered (param: as they are).
    compute_dtype: Literal["f32", "bf16", "f16", "param"] | None
    #: The optimizer's moments.
    moment_dtype: Literal["f32", "bf16", "f16", "param"] | None
    #: Products of the blocks in few bits: e4m3 forward, gradients in e5m2 (hybrid) or e4m3; e4m3
    #: with a scale for each 128 elements (block) or 32 (mxfp8); e2m1 with a scale for each 16
    #: (nvfp4).
    fp8: Literal["none", "hybrid", "e4m3", "block", "mxfp8", "nvfp4"] | None
    #: Scales of --fp8 are known before (delayed: casts run in the kernels around them) or come from
    #: the operand itself (current: casts are kernels).
    fp8_scaling: Literal["delayed", "current"] | None
    #: Parameters in fp32; products and attention cast their operands to bf16 where they use them,
    #: as torch.autocast.
    autocast: bool | None
    #: Of --autocast: attention casts its operands as products do, or is an operator of its own that
    #: autocast does not list, and takes them as they are given.
    autocast_attention: Literal["cast", "given"] | None
    #: ZeRO 0 and 1: reduce gradients in calls of this size, as soon as they are there (default 25
    #: MiB; 0: in one call after backward).
    ddp_bucket: int | None
    #: ZeRO 0 and 1: gradients are copied into flat buffers that stay from step to step, and reduced
    #: there, as DDP with gradient_as_bucket_view=False.
    ddp_copies: bool | None
    #: Activations that backward computes again: by policy, or the results of these ops.
    recompute: str | None
    #: Of --recompute full: keep the results of these ops, whether backward takes them or not; of
    #: einsum those that are matrix products.
    recompute_keep: str | Sequence[str] | None
    #: Of --recompute-keep: compute every N-th matrix product of a block again (0: none).
    recompute_products: int | None
    #: Recompute in the first N layers of each stage only (0: in all).
    recompute_layers: int | None
    #: Recompute in every N-th layer only (0: in all).
    recompute_every: int | None
    #: What --recompute selective computes again: scores of all pairs, attention, fused or not, or
    #: all but every other product and attention (products).
    recompute_selective: Literal["scores", "attention", "products"] | None
    #: Keep what the blocks stash, gradients, the optimizer's state or parameters in host memory, or
    #: values by name, scope or pattern; a share of each behind a colon, as in
    #: 'gqa/a:0.5,optimizer'.
    offload: str | Sequence[str] | None
    #: Write the copies of --offload as nodes of the trace (MEM_STORE, MEM_LOAD).
    memory_nodes: bool | None
    #: The optimizer.
    optimizer: Literal["adamw", "adam8bit", "adafactor", "muon", "lion", "sgd", "none"] | None
    #: AdamW is one kernel (fused), or several, each for all tensors (foreach) or for one after the
    #: other (for-loop); in-backward: gradients are used and freed as soon as they are there,
    #: without clipping.
    optimizer_form: Literal["fused", "foreach", "for-loop", "in-backward"] | None
    #: SGD has a momentum.
    sgd_momentum: bool | None
    #: Gradients have buffers that persist from step to step, or are freed before forward.
    grads: Literal["persistent", "freed"] | None
    #: Gradients of split tables of embeddings: split, or of all rows on each rank (whole).
    grad_tables: Literal["split", "whole"] | None
    #: Under ZeRO-2 and 3 gradients are reduced in each microbatch, once behind the last one, or
    #: once in a pipeline only (staged).
    grad_reduction: Literal["each", "once", "staged"] | None
    #: Tokens and labels count, in 64 bits each: as one tensor (shared) or as two (each).
    token_buffers: Literal["none", "shared", "each"] | None
    #: Tables of rotations count: made by forward and kept until backward ends (made), or a buffer
    #: in fp32 from step to step (buffer).
    rotation_tables: Literal["none", "made", "buffer"] | None
    #: Backward keeps a saved tensor until its last use, or until all gradients of the operation or
    #: of the checkpoint that saved it are there (node).
    saved_tensors: Literal["last_use", "last-use", "node"] | None
    #: Where nothing before the layers is trained the first one saves what all do (all), or nothing
    #: for the gradient of its input (needed).
    first_saved: Literal["all", "needed"] | None
    #: The cross entropy is one op (fused), one whose gradient takes the buffer of the logits (in-
    #: place), a log-softmax and the loss by it (stock, chunked: in parts of the tokens), or one op
    #: with the head, of which no whole logits are there (linear).
    loss: Literal["fused", "stock", "in-place", "chunked", "linear"] | None
    #: Logits of a split vocabulary stay split for the loss, or are gathered before it, in the type
    #: that the head gives them.
    loss_logits: Literal["split", "gathered"] | None
    #: Parts of the tokens of a chunked or linear loss (default: as the form has them).
    loss_chunks: int | None
    #: The kernel of attention: FlashAttention 1, 2 or 3, that of cuDNN or Triton, its products and
    #: softmax one by one (math; as transformers writes them: eager), or the one that the machine
    #: was measured with (device).
    attention: (
        Literal["device", "math", "eager", "flash-1", "flash-2", "flash-3", "cudnn", "triton"]
        | None
    )
    #: Run these operation by operation, as PyTorch code that no compiler has seen and no fused
    #: kernel replaces: swiglu, geglu, rmsnorm, attention, clamp, expert_bias, expert_weights.
    #: Backward keeps what each operation saves.
    eager: str | Sequence[str] | None
    #: The time that a host takes from one computation to the next, such as '9 us', where devices
    #: wait for it: of the machine if it is left out.
    host_issue: str | None
    #: Steps of training are captured as graphs, which hosts launch as a whole, as those of serving
    #: are.
    host_graphs: bool | None
    #: Of decode: the gap between two kernels of a captured graph, such as '0.5 us' (default: the
    #: launch gap of the machine).
    graph_gap: str | None
    #: Of serving: the time of the scheduler for a step, such as '1 ms' (default: none).
    host_step: str | None
    #: Of serving: the scheduler prepares a step when the one before has ended (between), or while
    #: devices run it (beside).
    host_scheduler: Literal["between", "beside"] | None
    #: Of serving: the time of a request before its first step and behind it, such as '10 ms'
    #: (default: none).
    host_request: str | None
    #: Of serving: prompts share steps with sequences that decode (beside), or have steps of their
    #: own, for which these wait (alone).
    prompt_steps: Literal["any", "beside", "alone"] | None
    #: Of serving: the most tokens of a step of a group of ranks, those of chunks of prompts
    #: included.
    step_tokens: int | None
    #: Of serving: the share of a device's memory that weights, activations and caches take, such as
    #: 9/10: all if it is left out.
    server_memory: float | str | None
    #: Of serving: a request is let in when the cache has room for all of its tokens, so that none
    #: is preempted.
    reserve_outputs: bool | None
    #: Of serving: new requests are looked for before each N-th step that decodes.
    scheduler_poll: int | None
    #: Of serving: steps that decode for which prompts wait for others at most, until they fill 9/10
    #: of the tokens of a step.
    scheduler_gather: int | None
    #: The share of their speed that products and attention keep in a step, such as 9/10: of the
    #: machine if it is left out.
    sustained: float | str | None
    #: Who adds up over ranks of a node: the communication library, or kernels that read the memory
    #: of other ranks (one-shot: all operands; two-shot: that, or each adds a part), where they are
    #: faster.
    all_reduce: Literal["library", "one-shot", "two-shot"] | None
    #: Bytes up to which --all-reduce holds; the library adds what is larger.
    all_reduce_below: int | None
    #: Collectives of activations work along any dimension (given), or along the first one, with
    #: copies behind gathers and before reductions along others (copied).
    collective_order: Literal["given", "copied"] | None
    #: Tokens go to their experts by an all-to-all, a copy for each expert, or once to each node and
    #: there to each rank (deepep); or all ranks gather all tokens, and add up what their own
    #: experts make of them (gather).
    moe_dispatch: Literal["all-to-all", "deepep", "gather"] | None
    #: Tokens are sent in the element type of the products of experts, cast before (products), or in
    #: their own, cast where they arrive (tokens).
    moe_payload: Literal["products", "tokens"] | None
    #: Rows that an all-to-all brought from several ranks are copied into the order of their
    #: experts, and results back into that of the ranks.
    moe_sort: bool | None
    #: Of --serve: two half batches, of which one computes while tokens of the other are on their
    #: way to experts and back.
    two_batch_overlap: bool | None
    #: How the weights of the blocks are stored while serving, and frozen ones in training.
    weight_dtype: Literal["bf16", "fp8", "int8", "int4", "mxfp4", "nvfp4", "nf4"] | None
    #: What products take activations in (auto: fp8 with fp8 and mxfp4 weights, fp4 with nvfp4,
    #: else, or where the machine has no units for that, as they are).
    activation_dtype: Literal["auto", "bf16", "fp8", "fp4", "int8"] | None
    #: Elements of a block of weights along a dimension (default: as the format has them).
    weight_block: int | None
    #: Train low-rank adapters of these parameters, such as wq,wv; freeze all others.
    lora: str | Sequence[str] | None
    #: The rank of the adapters.
    lora_rank: int | None
    #: The element type of the adapters of --lora: that of the parameters beside them (given), or
    #: f32, for which each adapter casts its input.
    lora_dtype: Literal["given", "f32"] | None
    #: Parameters that are not trained, by name, scope or pattern, such as 'vision,embed' or
    #: '*,!projector'.
    freeze: str | None
    #: Fill the vocabulary up to a multiple of this and the ranks that split it, as Megatron's
    #: --make-vocab-size-divisible-by.
    pad_vocab: int | None
    #: Fill feed-forward widths, those of experts too, up to a multiple of this on each rank that
    #: splits them, as engines do where blocks of weights of few bits do not divide.
    pad_widths: int | None
    #: A part of the model with a mesh and a strategy of its own, by the value that it computes:
    #: 'encoder=e: tp=2,dp=2'. May be given several times.
    part: str | Sequence[str] | None
    #: Passes to run (default: train; forward if no argument is a param), such as
    #: 'train,+after(infer-shapes):my-pass'.
    pipeline: str | None
    #: Write the module after every pass.
    dump_dir: str | Path | None
    #: Where to write a crash reproducer.
    reproducer: str | Path | None
    #: Compare numbers before and after each pass, on tiny sizes.
    check_numerics: bool | None
    #: Load a plug-in file.
    plugin: str | Path | Sequence[str | Path] | None
