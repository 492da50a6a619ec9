"""Bytes of every storage of a training step, by category, under fake tensors.

Each operation is dispatched to `StorageTracker`, which keeps weak references to the storages of
its results; what a storage is for is known by identity (parameters, gradients, states of the
optimizer, buffers and inputs) or by the operation that made it (FSDP2's collectives). Sizes are
read at each operation, so storages that FSDP2 frees by resizing count as nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.torch_memory.adapters import train_parts
from tools.torch_memory.layouts import layout_of, mesh_of, spread
from tools.torch_memory.models import model_of, outside_loss
from tools.torch_memory.pipelines import Pipeline, cut, stages_of
from tools.torch_memory.run import TorchRun

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
#: Bytes of each category.
Bytes = dict[str, int]


@dataclass
class Recorded:
    """Bytes by category at three moments of the second step; the operation at the peak, and the
    largest storages there: bytes, category, operation, type and shape."""

    after_forward: Bytes = field(default_factory=Bytes)
    peak: Bytes = field(default_factory=Bytes)
    after_update: Bytes = field(default_factory=Bytes)
    peak_at: str = ""
    largest: list[tuple[int, str, str, str]] = field(
        default_factory=list[tuple[int, str, str, str]]
    )


class StorageTracker(TorchDispatchMode):
    """What is alive, and the most that was alive since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self._refs: dict[int, Any] = {}
        self._made: dict[int, tuple[str, str]] = {}
        self._kinds: dict[int, str] = {}
        self.phase, self.idle = "setup", False
        self.restart()

    def restart(self) -> None:
        self.most, self.recorded = 0, Recorded()

    def mark(self, tensor: Tensor, kind: str) -> None:
        """A tensor is known to be of a kind."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self._track(local, "given")
        self._kinds[local.untyped_storage()._cdata] = kind

    def live(self) -> Iterator[tuple[int, int]]:
        for key, ref in list(self._refs.items()):
            storage = ref()
            if storage is not None:
                yield key, storage.nbytes()

    def forward_ended(self) -> None:
        """What is alive now is that after forward."""
        self.recorded.after_forward = self.by_category()

    def by_category(self) -> Bytes:
        bytes_of: Counter[str] = Counter()
        for key, size in self.live():
            bytes_of[self._kinds.get(key, "activations")] += size
        return {name: bytes_of[name] for name in CATEGORIES}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types):
            return NotImplemented  # what it makes of its local tensors is seen
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # fake tensors have a copy of it, devices have not
        results = func(*args, **(kwargs or {}))
        if self.idle:
            return results
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and not hasattr(each, "to_local"):
                self._track(each, str(func))
        live = sum(size for _, size in self.live())
        if live > self.most:
            self.most = live
            self.recorded.peak = self.by_category()
            self.recorded.peak_at = f"{self.phase}: {func}"
            self.recorded.largest = self._largest()
        return results

    def _track(self, tensor: Tensor, made_by: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage)
            self._made[key] = f"{self.phase}: {made_by}", f"{tensor.dtype} {tuple(tensor.shape)}"
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        for known in (self._refs, self._made, self._kinds):
            known.pop(key, None)

    def _largest(self) -> list[tuple[int, str, str, str]]:
        every = [
            (size, self._kinds.get(key, "activations"), *self._made[key])
            for key, size in self.live()
        ]
        return sorted(every, reverse=True)[:40]


@contextlib.contextmanager
def _fsdp_buffers(tracker: StorageTracker) -> Iterator[None]:
    """What FSDP2 gathers is `buffers`, what it reduces, and what it adds up before, `gradients`;
    what it has reduced is `buffers` until it is a gradient."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as calls
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    gather, alloc = calls.DefaultAllGather.allocate, FSDPParam.alloc_all_gather_outputs
    unshard, add_up = FSDPParam.init_unsharded_param, FSDPParam.to_accumulated_grad_if_needed
    scatter = calls.DefaultReduceScatter.allocate

    def gathered(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        made = gather(self, *args, **kwargs)
        tracker.mark(made, "buffers")
        return made

    kinds = itertools.cycle(("gradients", "buffers"))

    def reduced(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        made = scatter(self, *args, **kwargs)
        tracker.mark(made, next(kinds))  # the input of a reduce-scatter, then its output
        return made

    def unsharded(self: Any) -> None:
        alloc(self)
        for each in self.all_gather_outputs:
            tracker.mark(each, "buffers")

    def watched(self: Any) -> None:
        first = not hasattr(self, "_unsharded_param")
        unshard(self)
        if first:
            _watch_gradient(self._unsharded_param, tracker)

    def added_up(self: Any) -> None:
        add_up(self)
        if self.unsharded_accumulated_grad is not None:
            tracker.mark(self.unsharded_accumulated_grad, "gradients")

    FSDPParam.to_accumulated_grad_if_needed = added_up
    calls.DefaultAllGather.allocate = gathered
    calls.DefaultReduceScatter.allocate = reduced
    FSDPParam.alloc_all_gather_outputs = unsharded
    FSDPParam.init_unsharded_param = watched
    try:
        yield
    finally:
        calls.DefaultAllGather.allocate = gather
        calls.DefaultReduceScatter.allocate = scatter
        FSDPParam.alloc_all_gather_outputs = alloc
        FSDPParam.init_unsharded_param = unshard
        FSDPParam.to_accumulated_grad_if_needed = add_up


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Ranks of a mesh are numbers, also under fake tensors."""
    from torch.distributed.fsdp._fully_shard import _fully_shard as units

    concatenate, after_forward = DeviceMesh._concatenate, units._get_post_forward_mesh_info

    def real(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(meshes)

    def real_after_forward(*args: Any) -> Any:
        with unset_fake_temporarily():
            return after_forward(*args)

    DeviceMesh._concatenate = staticmethod(real)
    units._get_post_forward_mesh_info = real_after_forward
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(concatenate)
        units._get_post_forward_mesh_info = after_forward


@contextlib.contextmanager
def _shapes_alone(tracker: StorageTracker) -> Iterator[None]:
    """What DTensor runs to learn the shapes of global tensors is not there in a step."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, tracker.idle = tracker.idle, True
        try:
            return propagate(self, *args, **kwargs)
        finally:
            tracker.idle = before

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate


def record(run: TorchRun) -> Recorded:
    """The last of two steps of a run, or of three. Raises `ValueError` for what is written down
    nowhere: a model, a layout, a flag."""
    try:
        mesh, tracker = mesh_of(run), StorageTracker()
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        mode = contextlib.nullcontext() if layout_of(run).real else fake
        with _real_meshes(), _shapes_alone(tracker), mode, _fsdp_buffers(tracker):
            return _recorded(run, mesh, tracker)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _recorded(run: TorchRun, mesh: DeviceMesh | None, tracker: StorageTracker) -> Recorded:
    titan = run.flag("stack", "huggingface") == "torchtitan"
    sharded = run.flag("zero", 0) == 3
    given = "f32" if titan or run.flags.get("autocast") == "on" else "bf16"
    cast = run.flag("param_dtype", given) == "bf16"
    split = run.flag("tp", 1) > 1 or run.flag("pp", 1) > 1
    autocast = run.flag("autocast", titan and not sharded and not split and not cast)
    if run.flag("autocast_attention", "cast") != "cast":
        raise ValueError(f"{run.title}: attention of PyTorch {torch.__version__} casts")
    torch.set_default_dtype(torch.bfloat16 if cast else torch.float32)
    staged = run.flag("pp", 1) > 1
    models = [train_parts(model_of(run), run) for _ in (stages_of(run) if staged else (0,))]
    torch.set_default_dtype(torch.float32)
    with tracker:
        if staged:
            models = [cut(m, run, part) for m, part in zip(models, stages_of(run), strict=True)]
        nets = [spread(each, run, mesh, tracker.mark) for each in models]
        pipeline = None
        if staged and mesh is not None:
            moment, mark = tracker.forward_ended, tracker.mark
            pipeline = Pipeline(nets, run, mesh, outside_loss, moment, mark)
        microbatches = run.flag("microbatches", 1)
        for each in (p for model in models for p in model.parameters()):
            tracker.mark(each, "parameters")
            _watch_gradient(each, tracker)
        for each in (b for model in models for b in model.buffers()):
            tracker.mark(each, "buffers")
        trained = [p for model in models for p in model.parameters() if p.requires_grad]
        groups = [[p for p in trained if isinstance(p, DTensor) is d] for d in (False, True)]
        optimizer = _optimizer(run, [{"params": g} for g in groups if g])
        run.check()
        tokens = torch.zeros(run.sizes["B"], run.sizes["S"], dtype=torch.int64)
        labels = torch.zeros_like(tokens) if titan else tokens
        tracker.mark(tokens, "buffers")
        tracker.mark(labels, "buffers")
        for _ in range(
            3 if layout_of(run).real else 2
        ):  # DDP builds its buckets anew in the second
            optimizer.zero_grad(set_to_none=True)
            tracker.restart()
            if pipeline is not None:
                _scheduled(pipeline, optimizer, (tokens, labels), tracker)
            else:
                split = run.flag("tp", 1) > 1 and run.flag("loss_logits", "split") == "split"
                with loss_parallel() if split else contextlib.nullcontext():
                    _step(
                        nets[0],
                        optimizer,
                        (tokens, labels),
                        tracker,
                        titan=titan,
                        autocast=autocast,
                        microbatches=microbatches,
                    )
            for each in optimizer.state.values():
                for state in (x for x in each.values() if isinstance(x, Tensor)):
                    tracker.mark(state, "optimizer")
    return tracker.recorded


def _optimizer(run: TorchRun, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    form = run.flag("optimizer_form", "fused")
    given = {"fused": form == "fused", "foreach": form == "foreach"}
    match run.flag("optimizer", "adamw"):
        case "adamw":
            return torch.optim.AdamW(groups, **given)
        case "sgd":
            momentum = 0.9 if run.flag("sgd_momentum", False) else 0.0
            return torch.optim.SGD(groups, lr=1e-3, momentum=momentum, **given)
        case other:
            raise ValueError(f"{run.title}: no optimizer is written down for '{other}'")


def _scheduled(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[Tensor, Tensor],
    tracker: StorageTracker,
) -> None:
    tracker.phase = "schedule"
    pipeline.step(*inputs)
    for each in pipeline.received():
        tracker.mark(each, "buffers")
    tracker.phase = "update"
    optimizer.step()
    tracker.recorded.after_update = tracker.by_category()


def _step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[Tensor, Tensor],
    tracker: StorageTracker,
    *,
    titan: bool,
    autocast: bool,
    microbatches: int,
) -> None:
    for count in range(microbatches, 0, -1):
        if microbatches > 1 and not titan and isinstance(net, FSDPModule):
            net.set_requires_gradient_sync(count == 1)  # `no_sync` of accelerate
        waits = isinstance(net, DistributedDataParallel) and count > 1
        tracker.phase = "forward"
        tokens, labels = (each.chunk(microbatches)[-count] for each in inputs)
        with net.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = outside_loss(net(tokens), labels) if titan else net(tokens, labels)
            tracker.forward_ended()
            tracker.phase = "backward"
            loss.backward()
        del loss
    tracker.phase = "update"
    optimizer.step()
    tracker.recorded.after_update = tracker.by_category()


def _watch_gradient(parameter: Tensor, tracker: StorageTracker) -> None:
    """A gradient is one when it has been accumulated; what is not trained has none."""
    if not parameter.requires_grad:
        return

    def accumulated(of: Tensor) -> None:
        if of.grad is not None:
            tracker.mark(of.grad, "gradients")

    parameter.register_post_accumulate_grad_hook(accumulated)
