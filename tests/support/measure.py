"""Memory of one rank: bytes of parameters, gradients, optimizer state and kept activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job


def measure_rank(worker: WorkerContext, job: dict[str, Any], plan: Plan) -> dict[str, int]:
    """Bytes on this rank by kind, each at its peak within the job's steps.

    Gradients and gathered parameters are looked at between the operators of each block; what shares
    storage counts once.
    """
    from wanma.collectives.shared_memory.backend import allocated_bytes
    from wanma.data.step_loader import StepLoader
    from wanma.models.model_spec import apply_freezing_to_spec
    from wanma.parallel.mesh.parallel_mesh import open_mesh
    from wanma.parallel.parallelize import parallelize
    from wanma.training.loss.loss_functions import CrossEntropy
    from wanma.training.optimizer.named_optimizer import build_optimizer
    from wanma.training.step.forward_backward import ForwardBackward

    parsed = Job.model_validate(job)
    peaks: dict[str, int] = {}

    def note(kind: str, count: int) -> None:
        peaks[kind] = max(peaks.get(kind, 0), count)

    with open_mesh(worker, plan, 60, parsed.parallel.collectives) as grid:
        data, spec = _open(parsed)
        parallel = parallelize(apply_freezing_to_spec(spec, parsed.train.parameter_groups), plan, grid, 1)
        parallel.initialize_parameters()
        module = parallel.module
        updater = build_optimizer(dict(module.named_parameters()), parsed.train, plan, roles=parallel.roles)
        run = ForwardBackward(parallel, plan, grid, CrossEntropy(classes_last=True))
        groups = [
            m._get_fsdp_state()._fsdp_param_group for m in module.modules() if isinstance(m, FSDPModule)
        ]
        managed = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
        own = list(module.parameters())
        mine = {id(parameter) for parameter in own}

        def look(*_: Any) -> None:
            # What all ranks have in common is not gathered: each has its part of it.
            gathered = [p for p in managed if not hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")]
            whole = [p._unsharded_param for p in gathered if hasattr(p, "_unsharded_param")]
            # What computes in the state's own memory holds gradients, and nothing else.
            whole += (
                [p for p in module.parameters() if id(p) not in mine]
                if plan.computes_on_master_weights
                else []
            )
            note("parameters", size([*own, *([] if plan.computes_on_master_weights else whole)]))
            note(
                "gradients",
                size(
                    g
                    for g in (
                        *(p.grad for p in (*own, *whole)),
                        *(p.unsharded_accumulated_grad for p in managed),
                    )
                    if g is not None
                ),
            )

        def watch(gradient: Tensor) -> None:
            look()

        def after(module: Any, arguments: Any, output: Any) -> None:
            look()
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(watch)

        for inner in module.modules():
            if not list(inner.children()):
                inner.register_forward_hook(after)
        with StepLoader(data, plan, parsed.train, grid.data_rank, 0, 1) as loader:
            for step in loader:
                run(step.micro_batches, 1.0 / step.global_batch_size)
                look()
                updater.step(1e-3)
                updater.zero_gradients()
        note("optimizer", size(updater.state_tensors().values()))
        computing = [shard._sharded_local_tensor for shard in managed if shard.param_dtype is None]
        in_place = size(one for one in computing if hasattr(one, "fsdp_pre_all_gather"))
        note("buffers", allocated_bytes() - in_place)
    return peaks


def kept_activations(job: dict[str, Any], plan: Plan) -> int:
    """Bytes that autograd keeps of the first micro-batch of a job on one process, its loss included."""
    from wanma.models.model_spec import build_model
    from wanma.parallel.memory.recompute import apply_recompute
    from wanma.parallel.precision.autocast import PRECISION_DTYPES
    from wanma.training.loss.loss_functions import CrossEntropy

    parsed = Job.model_validate(job)
    data, spec = _open(parsed)
    model = build_model(spec, 1, PRECISION_DTYPES[plan.precision])
    assert spec.parallel_spec is not None
    assert spec.parallel_spec.blocks is not None
    apply_recompute(list(model.get_submodule(spec.parallel_spec.blocks).children()), plan)
    batch = data.batch(range(plan.micro_batch))
    losses: list[Any] = []
    return held_after(
        lambda: losses.append(CrossEntropy(classes_last=True)(model(*batch.inputs, **batch.keywords), batch))
    )


def kept_by_rank(worker: WorkerContext, job: dict[str, Any], plan: Plan) -> int:
    """Bytes that autograd keeps on this rank of the first micro-batch, its loss included."""
    from wanma.models.model_spec import apply_freezing_to_spec
    from wanma.parallel.mesh.parallel_mesh import open_mesh
    from wanma.parallel.parallelize import parallelize
    from wanma.training.loss.loss_functions import CrossEntropy
    from wanma.training.step.forward_backward import ForwardBackward

    parsed = Job.model_validate(job)
    with open_mesh(worker, plan, 60) as grid:
        data, spec = _open(parsed)
        parallel = parallelize(apply_freezing_to_spec(spec, parsed.train.parameter_groups), plan, grid, 1)
        parallel.initialize_parameters()
        run = ForwardBackward(parallel, plan, grid, CrossEntropy(classes_last=True))
        batch = data.batch(range(plan.micro_batch))
        run.losses(batch)  # gathers the weights, which are no activations
        losses: list[Any] = []

        def forward() -> None:
            losses.append(run.losses(batch))

        return held_after(forward)


def _open(job: Job) -> tuple[Any, Any]:
    """The job's dataset, and the spec of its model for these data."""
    from wanma.data.opening import open_dataset
    from wanma.models.model_spec import resolve_model_spec

    data = open_dataset(job.data, job.train)
    sizes = {
        "vocabulary_size": data.vocabulary_size,
        "image_shape": data.image_shape,
        "classes": data.classes,
    }
    return data, resolve_model_spec(job.model, sequence_length=job.data.sequence_length, **sizes)


def held_after(run: Callable[[], Any]) -> int:
    """Bytes that `run` allocates and that are still held when it is over, whoever holds them."""
    made: dict[int, StorageWeakRef] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            given = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and storage(leaf) not in given:
                    reference = StorageWeakRef(leaf.untyped_storage())
                    made.setdefault(reference.cdata, reference)
            return result

    with Watch():
        run()
    alive = [reference for reference in made.values() if not reference.expired()]
    return sum(UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes() for reference in alive)


def local(tensor: Tensor) -> Tensor:
    from wanma.checkpoint.format.local_shards import local_tensor

    return local_tensor(tensor)


def storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the local parts; each storage once."""
    return sum({storage(tensor): local(tensor).untyped_storage().size() for tensor in tensors}.values())
