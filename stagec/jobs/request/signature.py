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
    #: Total number of ranks: sets the axis left open (--dp if no --mesh), or checks their product.
    ranks: int | None
    #: Compile a step of serving instead of a training step.
    serve: Literal["prefill", "decode", "mixed", "disaggregated"] | None
    #: Sequences of the step, over all ranks; in a mixed step the decoding sequences of each group
    #: of ranks with requests of its own.
    batch: int | None
    #: New tokens of each sequence of prefill; in a mixed step the prompt whose last chunk it
    #: computes.
    prompt: int | None
    #: Cached tokens of each sequence before the step.
    context: int | None
    #: With --serve prefill or mixed: tokens of the prompt per step (chunked prefill).
    chunk: int | None
    #: With --serve decode: draft tokens per sequence and step.
    speculative: int | None
    #: With --serve mixed: the sequences of the step, such as decode=64x4096,prefill=1x2048+0
    #: (sequences x new tokens + cached ones; chunk= samples none, verify= all).
    step: str | None
    #: With --serve disaggregated: the strategy of the pod for prefill, 'tp=4,sp'.
    prefill: str | None
    #: With --serve disaggregated: the strategy of the pod for decode, 'tp=4,sp'.
    decode: str | None
    #: With --serve: caches have whole pages of this number of tokens.
    page: int | None
    #: With --serve: the element type of cached keys and values (default: as computed).
    kv_dtype: Literal["bf16", "fp8", "int8"] | None
    #: With --serve and a split vocabulary: sample from gathered logits, as engines do (default), or
    #: from the maxima of the ranks (local); none returns logits.
    sampling: Literal["gather", "local", "none"] | None
    #: With --serve decode: the model that computes the --speculative drafts, in a pod of its own:
    #: 'llama3-8b: tp=2'. 'llama3-8b[L=4]: tp=2' sets its sizes, 'llama3-8b: on=model' uses the
    #: ranks of the main model.
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
    #: Tensor-parallel ranks with the same value send one part each to the next stage, which gathers
    #: it.
    scatter_gather: bool | None
    #: With --serve and --pp 2: attention of all layers runs on one stage, their feed-forward on the
    #: other one, and two microbatches alternate.
    afd: bool | None
    #: Receive buffers of a pipeline: from arrival to last use (arrive), or one for each microbatch,
    #: kept across steps (ahead).
    stage_receives: Literal["arrive", "ahead"] | None
    #: The result of a pipeline stage is freed when it is sent, when the backward of its microbatch
    #: ends (backward), or in the last stage when the step ends (step).
    stage_results: Literal["sent", "backward", "step"] | None
    #: The gradient that a pipeline stage sends is freed when it is sent, or when that of the next
    #: microbatch exists, in 1F1B (next).
    stage_gradients: Literal["sent", "next"] | None
    #: Where a schedule splits backward, what forward saved is freed when it is last used, or when
    #: the gradients of weights of its microbatch have been made (weights).
    stage_graph: Literal["used", "weights"] | None
    #: HSDP: replicas of the shard groups.
    dp_replicate: int | None
    #: HSDP: ranks of a shard group.
    dp_shard: int | None
    #: Context-parallel ranks.
    cp: int | None
    #: How attention reads the whole sequence.
    cp_mode: Literal["ring", "ulysses", "all-gather"] | None
    #: Order of the sequence over the ranks of a ring; zigzag balances the causal mask.
    cp_order: Literal["zigzag", "plain"] | None
    #: With --cp-mode all-gather: gather keys and values again in backward, or save them.
    cp_inputs: Literal["regather", "save-gathered"] | None
    #: Run ring attention as one kernel (fused), or operation by operation as PyTorch's
    #: context_parallel does: with keys and values of all ranks in one buffer (gathered), or passed
    #: on.
    ring_steps: Literal["fused", "gathered", "passed"] | None
    #: Expert-parallel ranks, taken from the data-parallel ones.
    ep: int | None
    #: Ranks that split each expert: as many as tp, or 1, or tp over --ep if that takes some ranks
    #: of tp. The default, 0, means 1 if --ep takes all ranks of tp, otherwise as many as it leaves.
    etp: int | None
    #: Each rank of tp has all of the shared experts, as in SGLang with SGLANG_SHARED_EXPERT_TP1,
    #: where blocks of low-bit weights do not divide.
    whole_shared_experts: bool | None
    #: On which devices products of experts in mxfp4 and nvfp4 order tokens, compute the activation
    #: behind them and cast its result.
    fuse_experts: Literal["none", "blackwell"] | None
    #: Rows of the expert buffers over those of balanced load, such as 5/4.
    capacity_factor: float | str | None
    #: Tokens that each expert receives: a JSON file with a list, or with a list for each layer; or
    #: the list itself.
    expert_load: str | Path | Sequence[int] | Sequence[Sequence[int]] | None
    #: Whether all experts are equally likely, or some are chosen more often (spread), so that few
    #: tokens reach fewer experts.
    expert_popularity: Literal["even", "spread"] | None
    #: The share of the speed of products that grouped products of experts sustain, such as 1/2
    #: (default: all of it).
    sustained_experts: float | str | None
    #: Results of experts are multiplied by the weights of tokens where they are added up (results),
    #: or their gated activations are, by weights that are sent with the tokens (activation).
    moe_weights: Literal["results", "activation"] | None
    #: Gather rows of experts that tensor-parallel ranks split again in backward as --tp-inputs says
    #: (regather), or save them (save-gathered).
    moe_inputs: Literal["regather", "save-gathered"] | None
    #: Rows of experts end with their last use (op), or code has names for them until the layer
    #: returns, and for what keeps the graph of a checkpoint until its next forward (layer).
    moe_names: Literal["op", "layer"] | None
    #: Shared experts are computed where the model's text has them (text), or before tokens are sent
    #: to the routed ones (first).
    moe_shared: Literal["text", "first"] | None
    #: With --serve: this many copies of popular experts, in addition to the model's experts.
    redundant_experts: int | None
    #: Element type of the weights of routers and of the products with them (given: as the model has
    #: them).
    router_dtype: Literal["given", "f32"] | None
    #: Order of these mesh axes, slowest first, within the places that they have: dp,pp makes
    #: pipeline stages neighbours (default: pp, dp, ep, cp, tp).
    mesh_order: str | Sequence[str] | None
    #: ZeRO-3: neighbouring ranks over which blocks stay split between forward and backward, in
    #: place of all ranks.
    reshard_ranks: int | None
    #: Sequence parallelism between the blocks, over tp.
    sp: bool | None
    #: With --serve: split the sequences between the blocks over tp, for whole experts.
    dp_attention: bool | None
    #: With --serve decode and mixed: ranks of tp that split the cached tokens of a sequence (decode
    #: context parallelism of vLLM).
    dcp: int | None
    #: ZeRO stage over dp; 3 is FSDP.
    zero: int | None
    #: ZeRO-3: whether to free gathered parameters after forward: always, in all blocks but the
    #: last, or never.
    reshard_after_forward: Literal["always", "never", "last"] | None
    #: ZeRO-3: gather parameters this many blocks ahead.
    fsdp_prefetch: int | None
    #: ZeRO-1: gather updated parameters during the forward of the first microbatch, block by block,
    #: not after their update.
    overlap_param_gather: bool | None
    #: ZeRO-3: parameters outside the blocks are one unit, gathered from forward to the end of
    #: backward (root), or two (ends): the unit before the blocks is freed after forward and
    #: gathered again for its backward.
    shard_units: Literal["root", "ends"] | None
    #: ZeRO-3: the loss is inside the sharded module, so the gather of the last block lasts until
    #: the loss, and backward begins with gathering it again (inside), or after the module
    #: (outside).
    shard_loss: Literal["outside", "inside"] | None
    #: ZeRO-3: copy the gradients of a unit into a buffer to reduce, and what forward gathers out of
    #: one; each stays until that of the next unit exists, as in FSDP2.
    shard_copies: bool | None
    #: ZeRO-3: keep parameters of the last blocks that backward uses before N elements of others
    #: have been used (0: none), as stage3_max_reuse_distance of DeepSpeed.
    shard_reuse: int | None
    #: ZeRO: parameters that the ranks do not divide stay whole (none), or are padded to equal
    #: shards: along the first dimension of PyTorch's weight, its outputs (dim0), or over all
    #: elements (flat).
    shard_padding: Literal["none", "dim0", "flat"] | None
    #: Microbatches whose gradients are accumulated (default: 1, or 2 per pipeline stage; 2 with
    #: --afd).
    microbatches: int | None
    #: Gather the logits instead of a vocabulary-parallel loss.
    no_vocab_parallel: bool | None
    #: Gather inputs of split products again in backward, or save them.
    tp_inputs: Literal["regather", "save-gathered"] | None
    #: Split products wait for the gather of their input (whole), or overlap with it (in-steps).
    tp_gathers: Literal["whole", "in-steps"] | None
    #: Free gathered inputs after the last product that reads them, or when the module of these
    #: products returns.
    tp_inputs_until: Literal["product", "module"] | None
    #: What the head gathers is a new tensor, or in a buffer that stays across steps.
    tp_head_input: Literal["tensor", "buffer"] | None
    #: Sum a split product after it ends (whole), or part by part while the rest of it runs (in-
    #: steps).
    tp_outputs: Literal["whole", "in-steps"] | None
    #: Whether computations overlap with collectives of tensor parallelism.
    async_tp: bool | None
    #: Run consecutive element-wise computations as one kernel: without norms and softmax
    #: (pointwise), with them (elementwise), also after a matrix product (epilogue), or each alone
    #: (none).
    fusion: Literal["none", "pointwise", "elementwise", "epilogue"] | None
    #: Matrix products add weight gradients to the sum over microbatches themselves.
    fuse_gradients: bool | None
    #: Fuse matrix products of one operand with several weights, such as those of queries, keys and
    #: values.
    fuse_products: bool | None
    #: With --serve: one kernel rotates queries and keys, casts, and writes rows into caches.
    fuse_caches: bool | None
    #: The sum at the end of a layer is part of the kernel of the next norm.
    fuse_sums: bool | None
    #: Casts to this number of bits or fewer are separate kernels, not fused with the norm or the
    #: activation before them.
    own_casts: int | None
    #: Element type of parameters and activations.
    param_dtype: Literal["f32", "bf16", "f16"] | None
    #: Element type of gradients; param: that of their parameter.
    grad_dtype: Literal["f32", "bf16", "f16", "param"] | None
    #: Element type in which gradients are reduced.
    reduce_dtype: Literal["f32", "bf16", "f16", "param", "compute"] | None
    #: Element type of the optimizer's copy of the parameters; none: no copy.
    master_dtype: Literal["f32", "bf16", "f16", "none"] | None
    #: Element type in which ZeRO-3 gathers parameters and computes; each gather casts (param: that
    #: of the parameters).
    compute_dtype: Literal["f32", "bf16", "f16", "param"] | None
    #: Element type of the optimizer's moments.
    moment_dtype: Literal["f32", "bf16", "f16", "param"] | None
    #: 8- or 4-bit operands of the blocks' products: e4m3 forward, gradients in e5m2 (hybrid) or
    #: e4m3; e4m3 with a scale for each 128 elements (block) or 32 (mxfp8); e2m1 with a scale for
    #: each 16 (nvfp4).
    fp8: Literal["none", "hybrid", "e4m3", "block", "mxfp8", "nvfp4"] | None
    #: Scales of --fp8 are known before (delayed: surrounding kernels cast) or computed from the
    #: operand (current: casts are kernels).
    fp8_scaling: Literal["delayed", "current"] | None
    #: Casts of parameters by --fp8: in forward and backward of each microbatch (each), in the first
    #: one of a step, whose copies stay (once), or in the update (stored).
    fp8_weights: Literal["each", "once", "stored"] | None
    #: Parameters are fp32, unless --param-dtype is given; products and attention cast their
    #: operands to bf16, as torch.autocast does.
    autocast: bool | None
    #: With --autocast: attention casts its operands as products do, or is an operator that autocast
    #: does not cast for.
    autocast_attention: Literal["cast", "given"] | None
    #: ZeRO 0 and 1: reduce gradients in calls of this size, as soon as they are computed (default
    #: 25 MiB; 0: in one call after backward).
    ddp_bucket: int | None
    #: ZeRO 0 and 1: copy gradients into flat buffers that stay across steps, and reduce those, as
    #: DDP with gradient_as_bucket_view=False.
    ddp_copies: bool | None
    #: ZeRO 0 and 1: copy gradients into flat buffers as soon as they are complete; they are parts
    #: of these from then on, as in DDP with gradient_as_bucket_view=True.
    ddp_views: bool | None
    #: Activations that backward recomputes: by policy, or the results of these ops.
    recompute: str | None
    #: With --recompute full: save the results of these ops, even if backward does not read them;
    #: for einsum those of matrix products in 16 bits or more, not of experts.
    recompute_keep: str | Sequence[str] | None
    #: With --recompute-keep: recompute every N-th matrix product of a block (0: none).
    recompute_products: int | None
    #: With --recompute selective: the modules of a block with checkpoints of their own, as in
    #: recompute_modules of Megatron-Core.
    recompute_modules: str | Sequence[str] | None
    #: Recompute in the first N layers of each stage only (0: in all).
    recompute_layers: int | None
    #: Recompute in every N-th layer only (0: in all).
    recompute_every: int | None
    #: What --recompute selective recomputes: scores of all pairs, attention (fused or not), or all
    #: but attention and every other product (products).
    recompute_selective: Literal["scores", "attention", "products"] | None
    #: Keep these in host memory: the stash of the blocks (activations), gradients, optimizer,
    #: parameters, or values by name, scope or pattern. A number after a colon is the share, as in
    #: 'attn_out:0.5,optimizer'.
    offload: str | Sequence[str] | None
    #: Write the copies of --offload as nodes of the trace (MEM_STORE, MEM_LOAD).
    memory_nodes: bool | None
    #: The optimizer.
    optimizer: Literal["adamw", "adam8bit", "adafactor", "muon", "lion", "sgd", "none"] | None
    #: AdamW is one kernel (fused), or several, each for all tensors (foreach) or for one after the
    #: other (for-loop); in-backward: use and free gradients as soon as they are computed, without
    #: clipping.
    optimizer_form: Literal["fused", "foreach", "for-loop", "in-backward"] | None
    #: With --offload optimizer: states are copied to the device for their update (device), or the
    #: CPU updates them in host memory (host).
    offload_update: Literal["device", "host"] | None
    #: With adam8bit: moments of embedding tables in blocks of 8 bits, or in fp32.
    table_moments: Literal["blocks", "f32"] | None
    #: SGD uses momentum.
    sgd_momentum: bool | None
    #: Gradient buffers persist across steps, are freed before forward, or by their update
    #: (updated).
    grads: Literal["persistent", "freed", "updated"] | None
    #: Gradients of split embedding tables: split, or of all rows on each rank (whole).
    grad_tables: Literal["split", "whole"] | None
    #: Under ZeRO-2 and 3 gradients are reduced in each microbatch, once behind the last one, or
    #: once in a pipeline only (staged).
    grad_reduction: Literal["each", "once", "staged"] | None
    #: A gradient is added to the sum of microbatches as it is (direct), or cast to the type of the
    #: sum before, by a kernel of its own (cast).
    grad_sums: Literal["direct", "cast"] | None
    #: Copy gradients that ZeRO reduces into a buffer of N elements (0: none), as reduce_bucket_size
    #: of DeepSpeed.
    grad_flat: int | None
    #: How many such buffers there are: 2 with overlap_comm of DeepSpeed.
    grad_flat_buffers: int | None
    #: Under ZeRO-1 ranks reduce the part of the gradients that they update (reduce-scatter), or all
    #: of them (all-reduce).
    grad_collective: Literal["reduce-scatter", "all-reduce"] | None
    #: Count the batch as memory, tokens and labels in 64 bits: in one tensor (shared) or two
    #: (each).
    token_buffers: Literal["none", "shared", "each"] | None
    #: Count the tables of rotary embeddings: made by forward and kept until backward ends (made),
    #: or a buffer in fp32 that stays across steps, of complex numbers (buffer) or of cosines and
    #: sines (cos-sin).
    rotation_tables: Literal["none", "made", "buffer", "cos-sin"] | None
    #: Backward keeps a saved tensor until its last use, or until the operation or checkpoint that
    #: saved it has all its gradients (node).
    saved_tensors: Literal["last-use", "node"] | None
    #: If nothing before the layers is trained, the first layer saves what all others save (all), or
    #: leaves out what only the gradient of its input needs (needed).
    first_saved: Literal["all", "needed"] | None
    #: A checkpoint computes its block again up to the last operation that backward needs (needed),
    #: or all of it (whole), and keeps the results (replayed).
    recompute_blocks: Literal["needed", "whole", "replayed"] | None
    #: The cross entropy is one op (fused), one that casts its logits (compiled), one op whose
    #: gradient takes the buffer of the logits (in-place: in several kernels; fused-in-place), a
    #: log-softmax and a loss (stock, or chunked: in parts of the tokens), or one op with the head,
    #: without whole logits (linear).
    loss: (
        Literal["fused", "stock", "in-place", "fused-in-place", "chunked", "compiled", "linear"]
        | None
    )
    #: Logits of a split vocabulary stay split for the loss, or are gathered before it in the type
    #: of the head.
    loss_logits: Literal["split", "gathered"] | None
    #: Parts of the tokens of a chunked or linear loss (default: that of the form).
    loss_chunks: int | None
    #: The kernel of attention: FlashAttention 1, 2 or 3, cuDNN, Triton, the one that PyTorch
    #: chooses (sdpa), products and softmax one by one (math; as in transformers: eager), or the
    #: kernel with which the machine was measured (device).
    attention: (
        Literal[
            "device", "math", "eager", "sdpa", "flash-1", "flash-2", "flash-3", "cudnn", "triton"
        ]
        | None
    )
    #: The kernel that multiplies weights of 4 bits by activations of 16: that of Marlin, which
    #: weights in int4 have anyway, or the one with which the machine was measured (device).
    expanding_kernel: Literal["device", "marlin"] | None
    #: The kernel that multiplies weights in blocks of fp8, but for those of experts: that of
    #: FlashInfer on Blackwell, or the one with which the machine was measured (device).
    block_kernel: Literal["device", "flashinfer"] | None
    #: The kernel that multiplies weights of experts: in blocks of fp8 that of Triton with its
    #: default blocks, or the backend DEEPGEMM of TensorRT-LLM, in nvfp4 its backend CUTLASS, or the
    #: one with which the machine was measured (device).
    expert_kernel: Literal["device", "triton-blocks", "deepgemm", "cutlass"] | None
    #: Run these operation by operation, as PyTorch without a compiler or fused kernels does:
    #: swiglu, geglu, gelu, rmsnorm, layernorm, attention, normed_keys, route, part_of, clamp,
    #: expert_bias, expert_weights, expert_rows, scaled_rope, complex_rope, alibi, sinks, softcap;
    #: or none of a stack's (none); gate_in_place: as kernels of a compiler overwrite gate and up,
    #: gate_up_in_place and norm_in_place: as those of Liger do. Backward keeps the tensors that
    #: each operation saves.
    eager: str | Sequence[str] | None
    #: Time of a host from one computation to the next, such as '9 us', for which devices may wait
    #: (default: that of the machine).
    host_issue: str | None
    #: Time of a host for a computation of backward, which the engine of gradients launches
    #: (default: --host-issue).
    host_issue_backward: str | None
    #: Hosts run ahead of devices (never), or wait for them at both ends of forward and backward of
    #: each microbatch (phases), or behind each kernel (kernels).
    host_waits: Literal["never", "phases", "kernels"] | None
    #: With --host-waits: time of a host before forward of a microbatch, such as '2 ms' (default:
    #: none).
    host_microbatch: str | None
    #: Time of a host between two steps of training, for which devices wait, such as '40 ms'
    #: (default: none).
    host_between: str | None
    #: Capture training steps as graphs, which hosts launch as a whole, as in serving.
    host_graphs: bool | None
    #: With --serve: hosts launch steps with prompts as a graph (captured), or issue them kernel by
    #: kernel (issued), each in --host-issue.
    host_prompts: Literal["captured", "issued"] | None
    #: Time of a host for a product in --host-product-bits or less on Blackwell, such as '200 us',
    #: if it chooses the kernel at each call (default: --host-issue).
    host_product: str | None
    #: With --host-product: the most bits of its operands.
    host_product_bits: int | None
    #: With --serve decode: the gap between two kernels of a captured graph, such as '0.5 us'
    #: (default: the launch gap of the machine).
    graph_gap: str | None
    #: With --serve: time of the scheduler per step, such as '1 ms' (default: none).
    host_step: str | None
    #: With --serve: the scheduler prepares a step after the step before (between), or while it runs
    #: (beside).
    host_scheduler: Literal["between", "beside"] | None
    #: With --serve: time of a request before its first step and after its last, such as '10 ms'
    #: (default: none).
    host_request: str | None
    #: With --serve: prompts share steps with decoding sequences (beside), or have steps of their
    #: own, for which these wait (alone).
    prompt_steps: Literal["any", "beside", "alone"] | None
    #: With --serve: the most tokens of a step of a group of ranks, including chunks of prompts.
    step_tokens: int | None
    #: With --serve: the share of a device's memory for weights, activations and caches, such as
    #: 9/10 (default: all).
    server_memory: float | str | None
    #: With --serve: admit a request only if the cache has room for all its tokens, so that none is
    #: preempted.
    reserve_outputs: bool | None
    #: With --serve: look for new requests before each N-th decode step.
    scheduler_poll: int | None
    #: With --serve: the most decode steps for which prompts wait for others, until they fill 9/10
    #: of the tokens of a step.
    scheduler_gather: int | None
    #: With --serve: the most decode steps for which prompts wait until each group of ranks with
    #: sequences of its own has one.
    scheduler_balance: int | None
    #: With --serve and --pp: the most sequences of each of the batches in flight, of which there
    #: are as many as pipeline stages (default: an equal share).
    scheduler_batch: int | None
    #: The share of their speed that products and attention sustain in a step, such as 9/10
    #: (default: that of the machine).
    sustained: float | str | None
    #: What reduces within a node: the communication library, or kernels that read the memory of
    #: other ranks, if they are faster (one-shot: all operands; two-shot: that, or each rank reduces
    #: a part).
    all_reduce: Literal["library", "one-shot", "two-shot"] | None
    #: The most bytes for --all-reduce; the library reduces more.
    all_reduce_below: int | None
    #: The most bytes that a rank reads from the others in one shot; two shots reduce more (0: any
    #: number in one).
    all_reduce_reads: int | None
    #: Kernels of all_reduces also add the residual and normalize.
    all_reduce_norms: bool | None
    #: Sums over rows that several norms need, such as those of queries and keys, are one
    #: all_reduce.
    all_reduce_statistics: bool | None
    #: Collectives of activations work along any dimension (given), or along the first only, with
    #: copies after gathers and before reductions along others (copied).
    collective_order: Literal["given", "copied"] | None
    #: Tokens reach their experts by an all-to-all, with a copy for each expert, or once per node
    #: and there once per rank (deepep); or ranks gather all tokens and add the results of their own
    #: experts (gather).
    moe_dispatch: Literal["all-to-all", "deepep", "gather"] | None
    #: Send tokens in the element type of the experts' products, cast before (products), or in their
    #: own type, cast on arrival (tokens).
    moe_payload: Literal["products", "tokens"] | None
    #: Copy rows from an all-to-all into the order of their experts, and results back into the order
    #: of the ranks.
    moe_sort: bool | None
    #: With --serve: two half batches, one of which computes while the tokens of the other travel to
    #: experts and back.
    two_batch_overlap: bool | None
    #: Element type of the blocks' weights in serving, and of frozen weights in training.
    weight_dtype: Literal["bf16", "fp8", "int8", "int4", "mxfp4", "nvfp4", "nf4"] | None
    #: Element type of activations in products (auto: fp8 with fp8 and mxfp4 weights, fp4 with
    #: nvfp4; otherwise, or if the machine has no such units, unchanged).
    activation_dtype: Literal["auto", "bf16", "fp8", "fp4", "int8"] | None
    #: Elements of a block of weights along a dimension (default: that of the format).
    weight_block: int | None
    #: Which weights have this type (auto: in a model with experts mxfp4 and nvfp4 in all but
    #: attention, int4 in experts that a router chooses; otherwise in all blocks).
    weight_parts: Literal["auto", "all", "feed-forward", "outputs", "experts"] | None
    #: The format in which experts are filled up with columns where ranks have no whole blocks of
    #: them.
    fill_experts: Literal["none", "mxfp4"] | None
    #: Low-rank adapters of these parameters, such as wq,wv, or of all linear modules but the head
    #: (all-linear); training freezes all others, serving has --max-loras of each.
    lora: str | Sequence[str] | None
    #: The rank of the adapters; in serving the largest, which all are filled up to.
    lora_rank: int | None
    #: With --serve and --lora: adapters that ranks hold, of which each sequence uses one at random.
    max_loras: int | None
    #: Element type of the adapters of --lora: that of the parameters (given), or f32, for which
    #: each adapter casts its input.
    lora_dtype: Literal["given", "f32"] | None
    #: Drop elements with the rates of the model's configuration (configured), or none.
    dropout: Literal["none", "configured"] | None
    #: Parameters that are not trained, by name, scope or pattern, such as 'vision,embed' or
    #: '*,!projector'.
    freeze: str | None
    #: Pad the vocabulary to a multiple of this number and of the ranks that split it, as Megatron's
    #: --make-vocab-size-divisible-by does.
    pad_vocab: int | None
    #: Pad feed-forward widths, also of experts, to a multiple of this number on each rank that
    #: splits them, as engines do if blocks of low-bit weights do not divide.
    pad_widths: int | None
    #: Give a part of the model its own mesh and strategy; VALUE is its result: 'encoder=e:
    #: tp=2,dp=2', or feed-forward, of all layers in a step of serving. May be given several times.
    part: str | Sequence[str] | None
    #: With a part that has the feed-forward: parts of the batch that take turns in each layer, so
    #: that both pods compute (default 2).
    part_batches: int | None
    #: In the flags of a --part: the machine of its ranks, as --machine (default: that of the job).
    on_machine: str | None
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
