"""How a model is spread over ranks: a layout is a function from a model and its run to what
training calls. `LAYOUTS` are tried in order; the first one whose flags the run has is taken."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tools.torch_memory.context import ring_attention
from tools.torch_memory.experts import TorchtitanExperts, exchanged, padded
from tools.torch_memory.models import Attention
from tools.torch_memory.run import TorchRun

_MiB = 1 << 20
#: What selective checkpoints keep (`_op_sac_save_list`), with the kernel of attention of CPUs.
_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
#: Says of which category the storage of a tensor is.
Mark = Callable[[torch.Tensor, str], None]


@dataclass(frozen=True)
class Layout:
    """The axes of the mesh, with the ranks of each, and what becomes of the model on it; `real`
    where it reads numbers, which fake tensors do not have."""

    axes: Callable[[TorchRun], dict[str, int]]
    apply: Callable[[nn.Module, TorchRun, DeviceMesh | None, Mark], nn.Module]
    real: bool = False


def mesh_of(run: TorchRun) -> DeviceMesh | None:
    """The mesh of a run over fake ranks, of which this is the first one, of its pipeline stage;
    None of one rank."""
    axes = layout_of(run).axes(run)
    if (stages := run.flag("pp", 1)) > 1:
        axes = {"pp": stages, **{name: size for name, size in axes.items() if name != "one"}}
    ranks = torch.Size(axes.values()).numel()
    if ranks == 1:
        return None
    rank = run.stage * (ranks // stages)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "ep" in axes or "cp" in axes:
        mesh._flatten("dp")
    return mesh


def spread(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    """Checkpoint the blocks and spread the model over the mesh, as the flags say."""
    _checkpoint(model, run)
    for module in model.modules() if run.flag("ep", 1) == 1 else ():
        if isinstance(module, TorchtitanExperts):
            padded(module)
    return layout_of(run).apply(model, run, mesh, mark)


def layout_of(run: TorchRun) -> Layout:
    """The layout of a run."""
    return next(each for each in LAYOUTS if each.axes(run))


def _checkpoint(model: nn.Module, run: TorchRun) -> None:
    """Full checkpoints of blocks, of every n-th one (torchtitan's `_apply_layer_sac`); torchtitan
    computes all of a block again (`ActivationCheckpoint.early_stop`)."""
    titan = run.flag("stack", "huggingface") == "torchtitan"
    default = ("full", 2) if titan else ("none", 0)
    policy = run.flag("recompute", default[0])
    every = run.flag("recompute_every", default[1] if "recompute" not in run.flags else 0) or 1
    if policy not in ("none", "full", "selective"):
        raise ValueError(f"{run.title}: no checkpoints are written down for '{policy}'")
    given: dict[str, Any] = {"context_fn": _selective} if policy == "selective" else {}
    given["early_stop"] = not titan
    for name, block in model.layers.named_children() if policy != "none" else ():
        if (int(name) + 1) % every == 0:
            model.layers.register_module(name, checkpoint_wrapper(block, **given))


def _selective() -> Any:
    """`_apply_op_sac` of torchtitan: every second product is computed again, and all that is not
    in `_KEPT`."""
    products = Counter[bool]()

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        second = False
        if func is torch.ops.aten.mm.default:
            products[ctx.is_recompute] += 1
            second = products[ctx.is_recompute] % 2 == 0
        kept = func in _KEPT and not second
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# -- one rank ----------------------------------------------------------------------------------


def _one(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    return model


# -- DDP ---------------------------------------------------------------------------------------


def _ddp_axes(run: TorchRun) -> dict[str, int]:
    return {"dp": run.flag("dp", 1)} if run.flag("dp", 1) > 1 and not run.flag("zero", 0) else {}


def _ddp(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    default = 100 if run.flag("stack", "huggingface") == "torchtitan" else 25
    views = run.flag("ddp_views", False)
    capacity = run.flag("ddp_bucket", default * _MiB) / _MiB
    net = DistributedDataParallel(
        model, bucket_cap_mb=capacity, gradient_as_bucket_view=views, init_sync=False
    )

    def reduced(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """As without a hook, in place; the reducer cannot take what a fake group returns."""
        future = torch.futures.Future[torch.Tensor]()
        future.set_result(bucket.buffer())
        mark(bucket.buffer(), "gradients" if views else "buffers")
        return future

    reduced.__annotations__.clear()  # the reducer compares texts with types
    net.register_comm_hook(None, reduced)
    return net


# -- FSDP2, HSDP -------------------------------------------------------------------------------


def _fsdp_axes(run: TorchRun) -> dict[str, int]:
    if run.flag("zero", 0) != 3:
        return {}
    replicas, shards = run.flag("dp_replicate", 1), run.flag("dp_shard", 1)
    return {"replicate": replicas, "shard": shards} if replicas > 1 else {"dp": run.flag("dp", 1)}


def _policy(run: TorchRun) -> dict[str, Any]:
    """How units are cast and sharded."""
    titan = run.flag("stack", "huggingface") == "torchtitan"
    mixed = run.flag("param_dtype", "f32" if titan else "bf16") == "f32"
    mixed = mixed and run.flag("compute_dtype", "bf16") == "bf16"
    reduce = run.flag("reduce_dtype", "f32" if titan else "bf16")
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32 if reduce == "f32" else torch.bfloat16,
        )
    never = run.flag("reshard_after_forward", "always") == "never"
    ranks = run.flag("reshard_ranks", 1)
    return {"mp_policy": policy, "reshard_after_forward": ranks if ranks > 1 else not never}


def _fsdp(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    titan = run.flag("stack", "huggingface") == "torchtitan"
    given = _policy(run)
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["dp"]
    shard = partial(fully_shard, mesh=mesh, **given)
    if run.flag("shard_units", "ends" if titan else "root") == "ends":
        if model.tok_embeddings is not None:
            shard(model.tok_embeddings)
        if model.output is not None:
            last = [model.norm, model.output]
            fully_shard(last, mesh=mesh, **given | {"reshard_after_forward": False})
    for block in model.layers:
        shard(block)
    fully_shard(model, mesh=mesh, mp_policy=given["mp_policy"])
    return model


# -- experts of torchtitan on ranks of their own, with FSDP2 over all --------------------------


def _expert_axes(run: TorchRun) -> dict[str, int]:
    ranks = run.flag("ep", 1)
    return {"dp_shard_mod_ep": run.flag("dp", 1) // ranks, "ep": ranks} if ranks > 1 else {}


def _experts(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    """`apply_moe_ep_tp` and `apply_fsdp` of torchtitan."""
    if mesh is None or run.flag("zero", 0) != 3:
        raise ValueError(f"{run.title}: experts on ranks of their own come with zero = 3")
    for experts in [m for m in model.modules() if isinstance(m, TorchtitanExperts)]:
        for name, weight in list(experts.named_parameters()):
            local = weight.new_empty(len(weight) // mesh["ep"].size(), *weight.shape[1:])
            split = DTensor.from_local(local, mesh["ep"], [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(split))
        exchanged(experts, mesh["ep"].get_group())
        ranks = mesh["dp_shard_mod_ep"].size() * mesh["ep"].size()
        placed = (lambda _: Shard(1)) if ranks > experts.w1.shape[0] else None
        given = _policy(run) | {"shard_placement_fn": placed}
        fully_shard(experts, mesh=mesh["dp_shard_mod_ep"], **given)
    net = _fsdp(model, run, mesh["dp"], mark)
    _prefetch(model)
    return net


def _prefetch(model: Any) -> None:
    """What units gather ahead where experts have ranks of their own (`apply_fsdp` of Llama 4)."""
    units = [[model.tok_embeddings]]
    for block in model.layers:
        inner = [m for m in block.modules() if isinstance(m, TorchtitanExperts)]
        units.append([block, *inner])
    units.append([model.norm, model.output])
    for unit, behind in itertools.pairwise(units):
        unit[0].set_modules_to_forward_prefetch(behind)
    *_, last = units
    for unit, before in itertools.pairwise(reversed(units)):
        unit[-1 if unit is last else 0].set_modules_to_backward_prefetch(before)


# -- parts of sequences, with FSDP2 over all ----------------------------------------------------


def _context_axes(run: TorchRun) -> dict[str, int]:
    ranks = run.flag("cp", 1)
    return {"dp_shard": run.flag("dp", 1), "cp": ranks} if ranks > 1 else {}


def _context(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    """`context_parallel` and `apply_fsdp` of torchtitan: parameters are split over both axes."""
    if mesh is None or run.flag("zero", 0) != 3:
        raise ValueError(f"{run.title}: ranks with parts of sequences come with zero = 3")
    group, rotation = mesh["cp"].get_group(), run.flag("ring_steps", "gathered")
    for each in [m for m in model.modules() if isinstance(m, Attention)]:
        each.over_ranks = partial(ring_attention, group, rotation)
    return _fsdp(model, run, mesh["dp"], mark)


# -- DTensor, with FSDP2 over the other axis ---------------------------------------------------


def _tensor_axes(run: TorchRun) -> dict[str, int]:
    if run.flag("tp", 1) < 2:
        return {}
    shards = {"dp": run.flag("dp", 1)} if run.flag("zero", 0) == 3 else {}
    return {**shards, "tp": run.flag("tp", 1)}


def _tensor(model: nn.Module, run: TorchRun, mesh: DeviceMesh | None, mark: Mark) -> nn.Module:
    """`apply_non_moe_tp` of torchtitan; without `sp` the plans of transformers, whose norms work on
    whole sequences."""
    split = run.flag("sp", False)
    loss = run.flag("loss_logits", "split") == "split"
    between: Placement = Shard(1) if split else Replicate()
    plans: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss else Replicate(),
            use_local_output=not loss,
        ),
        **({"norm": SequenceParallel()} if split else {}),
    }
    assert mesh is not None
    parallelize_module(model, mesh["tp"], plans)
    whole = Replicate()
    for block in model.layers:
        block_plan: dict[str, ParallelStyle] = {
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            **{
                n: RowwiseParallel(output_layouts=between)
                for n in ("attention.wo", "feed_forward.w2")
            },
        }
        if split:
            block_plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
            block_plan["attention"] = PrepareModuleInput(
                input_layouts=(between, None), desired_input_layouts=(whole, None)
            )
            block_plan["feed_forward"] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(whole,)
            )
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        parallelize_module(inner, mesh["tp"], block_plan)
    return _fsdp(model, run, mesh["dp"], mark) if "dp" in (mesh.mesh_dim_names or ()) else model


#: The last one takes every run that is left.
LAYOUTS: Sequence[Layout] = (
    Layout(_tensor_axes, _tensor),
    Layout(_context_axes, _context),
    Layout(_expert_axes, _experts),
    Layout(_fsdp_axes, _fsdp),
    Layout(_ddp_axes, _ddp, real=True),
    Layout(lambda run: {"one": run.flag("dp", 1)}, _one),
)
