"""Table of torch's private names: which versions have each, and the effect on wanma where it is missing.

tests/test_torch_internals.py looks up every row in the installed torch, and finds names without a row. A name
that the newest tried version has is expected in newer ones too.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.torch_internals.versions import (
    FIRST_TORCH_VERSION,
    NEWEST_TRIED_TORCH_VERSION,
    Version,
    installed_torch_version,
)


@dataclass(frozen=True)
class TorchInternal:
    """Private name of torch, or name in a private module or class."""

    name: str
    """Module and attributes: "torch.distributed:ProcessGroupGloo._Options"."""
    otherwise: str
    """Effect in a torch without the name."""
    first: Version = FIRST_TORCH_VERSION
    """First version known to have it."""
    last: Version = NEWEST_TRIED_TORCH_VERSION
    """Last version known to have it."""
    is_cuda_only: bool = False
    """True if only builds of torch for CUDA have it."""

    def is_in(self, torch_version: Version) -> bool:
        """Return whether a version has the name."""
        return self.first <= torch_version and (
            torch_version <= self.last or self.last == NEWEST_TRIED_TORCH_VERSION
        )


def is_available(name: str) -> bool:
    """Return whether the installed torch has a name of the table."""
    row = next(row for row in TORCH_INTERNALS if row.name == name)
    return row.is_in(installed_torch_version())


def _rows(
    owner: str,
    names: str,
    otherwise: str,
    first: Version = FIRST_TORCH_VERSION,
    last: Version = NEWEST_TRIED_TORCH_VERSION,
    *,
    is_cuda_only: bool = False,
) -> list[TorchInternal]:
    """Return a row for each of `names` in a module, or in a class with its module ("module:Class")."""
    separator = "." if ":" in owner else ":"
    return [
        TorchInternal(f"{owner}{separator}{name}", otherwise, first, last, is_cuda_only)
        for name in names.split()
    ]


_FSDP = "torch.distributed.fsdp._fully_shard"
_NO_RUN = "no run starts"
_NO_SHARED_MEMORY = "no run over shared memory; parallel.collectives = 'gloo' works"
_NO_FSDP = "no run with FSDP2: parallel.shard, train.precision below fp32"
_NO_TRACE = "no plan for models that are traced, such as model.factory"
_COARSE_TRACE = "traced models: the operator counts as one that reads its inputs once"
_NO_HANG_REPORT = "reports of a hang name no collectives over Gloo and NCCL"

TORCH_INTERNALS: tuple[TorchInternal, ...] = (
    # distributed.py
    *_rows(
        "torch._C._distributed_c10d",
        "AllToAllOptions AllgatherOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions "
        "BroadcastOptions ReduceScatterOptions",
        _NO_RUN,
    ),
    *_rows(
        "torch.distributed._functional_collectives",
        "AsyncCollectiveTensor all_to_all_single all_to_all_single_autograd wait_tensor",
        _NO_RUN,
    ),
    *_rows(
        "torch.distributed",
        "all_gather_single reduce_scatter_single",
        "the older names are used: all_gather_into_tensor, reduce_scatter_tensor",
        first=(2, 13),
    ),
    *_rows("torch.distributed.distributed_c10d", "_resolve_process_group", _NO_RUN),
    *_rows("torch.distributed:ProcessGroup", "_allgather_base _reduce_scatter_base", _NO_SHARED_MEMORY),
    *_rows("torch.distributed:Work", "_source_rank", "no receive from any rank over shared memory"),
    *_rows("torch.distributed:Backend", "_plugins", _NO_SHARED_MEMORY),
    *_rows("torch.distributed:ProcessGroup", "_set_default_backend _register_backend", _NO_SHARED_MEMORY),
    *_rows("torch.distributed:ProcessGroup", "_get_backend", "no run with FSDP2 on GPUs"),
    *_rows("torch.distributed:ProcessGroupGloo", "_set_default_timeout", _NO_SHARED_MEMORY),
    *_rows(
        "torch.distributed:ProcessGroupGloo",
        "_set_sequence_number_for_group",
        "not called: torch numbers the collectives of each group from 0",
        last=(2, 13),
    ),
    *_rows(
        "torch.distributed:ProcessGroupGloo",
        "_Options _Options._devices _Options._timeout",
        "wanma doctor fails at its check of Gloo",
    ),
    # uncompiled.py
    *_rows("torch._compile", "_disable_dynamo", _NO_RUN),
    *_rows("torch.optim.optimizer", "_use_grad_for_differentiable", _NO_RUN),
    # loaded.py
    *_rows("torch", "_dynamo", _NO_RUN),
    *_rows("torch._dynamo", "OptimizedModule", "modules of torch.compile are trained under names of its own"),
    *_rows("torch.distributed.distributed_c10d", "_world", _NO_RUN),
    *_rows("torch._C._distributed_c10d", "_dump_fr_trace_json", _NO_HANG_REPORT),
    *_rows("torch._C._distributed_c10d", "_dump_nccl_trace_json", _NO_HANG_REPORT, is_cuda_only=True),
    *_rows("torch.autograd.profiler", "_is_profiler_enabled", "`wanma profile` fails"),
    # fake_tensors.py
    *_rows("torch.testing._internal.distributed.fake_pg", "FakeStore", _NO_RUN),
    *_rows("torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode is_fake", _NO_RUN),
    # dispatch.py
    *_rows(
        "torch.utils._python_dispatch",
        "TorchDispatchMode _get_current_dispatch_mode_stack _pop_mode _push_mode",
        _NO_RUN,
    ),
    *_rows("torch.utils._pytree", "tree_leaves tree_map tree_map_only", _NO_RUN),
    *_rows("torch._C", "DispatchKey DispatchKeySet", _NO_RUN),
    *_rows("torch._C", "_AutoDispatchBelowAutograd", "no run with parallel.tp > 1"),
    *_rows("torch._ops:OpOverload", "_schema", _NO_RUN),
    # autograd.py
    *_rows("torch:Tensor", "_version _is_view _backward_hooks _post_accumulate_grad_hooks", _NO_RUN),
    *_rows("torch:UntypedStorage", "_cdata", _NO_TRACE),
    *_rows("torch._C", "_current_graph_task_id", _NO_FSDP),
    *_rows("torch._C", "_current_autograd_node", _NO_TRACE),
    *_rows("torch.autograd", "_get_sequence_nr", _NO_TRACE),
    *_rows("torch.autograd.graph:Node", "_sequence_nr", _NO_TRACE),
    *_rows(
        "torch.autograd.graph:NllLossBackward0",
        "_saved_ignore_index _saved_target",
        "no run of models that compute their own loss",
    ),
    *_rows(
        "torch.distributed.tensor._api",
        "_ToTorchTensor _FromTorchTensor",
        "parallel.tp > 1: cross entropy takes the memory of the logits once more",
    ),
    # pickling.py
    *_rows("torch.utils.data:DataLoader", "_iterator", "no loader with persistent_workers as data"),
    # modules.py
    *_rows(
        "torch.nn:Module",
        "_parameters _buffers _modules _forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks",
        _NO_RUN,
    ),
    *_rows(
        "torch.nn.modules.module",
        "_global_forward_pre_hooks _global_forward_hooks _global_backward_pre_hooks _global_backward_hooks "
        "_global_buffer_registration_hooks _global_module_registration_hooks "
        "_global_parameter_registration_hooks",
        "no run of Python objects with train.check_code",
    ),
    *_rows("torch.nn.modules.batchnorm", "_BatchNorm _NormBase", _NO_RUN),
    *_rows("torch.nn.modules.conv", "_ConvNd", _NO_RUN),
    *_rows("torch.nn.modules.instancenorm", "_InstanceNorm", _NO_RUN),
    # recompute.py
    *_rows("torch.utils.checkpoint", "_CachedTorchDispatchMode _CachingTorchDispatchMode", _NO_RUN),
    *_rows(
        "torch._dynamo.config",
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
        "no run with both parallel.compile and parallel.recompute",
    ),
    # dtensor.py
    *_rows("torch.distributed.tensor:DTensor", "_local_tensor _spec", _NO_RUN),
    *_rows("torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta", _NO_RUN),
    *_rows("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", _NO_RUN),
    *_rows("torch.distributed.tensor.placement_types", "_StridedShard", _NO_RUN),
    *_rows("torch.distributed.device_mesh:DeviceMesh", "_unflatten", _NO_RUN),
    *_rows(
        "torch.distributed.tensor._redistribute",
        "_gen_transform_infos clear_redistribute_planner_cache",
        _NO_RUN,
    ),
    *_rows("torch.distributed.tensor._collective_utils", "MeshTopoInfo", _NO_RUN),
    *_rows("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", _NO_RUN),
    *_rows("torch.distributed.tensor:DTensor", "_op_dispatcher", _NO_RUN),
    *_rows(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator", "_propagate_tensor_meta_cached", _NO_RUN
    ),
    # pipelining.py
    *_rows(
        "torch.distributed.pipelining:PipelineStage",
        "_get_init_p2p_neighbors_ops",
        "not called: torch greets no neighbours",
        last=(2, 14),
    ),
    *_rows(
        "torch.distributed.pipelining.schedules:_ComputationType",
        "FORWARD SEND_F RECV_F UNSHARD RESHARD",
        "no evaluation with parallel.pp > 1",
    ),
    *_rows(
        "torch.distributed.pipelining.schedules:_ComputationType",
        "WAIT_SEND_F",
        "a send is waited for by torch's schedule itself",
        first=(2, 15),
    ),
    *_rows(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime",
        "pipeline_order_with_comms",
        "no evaluation with parallel.pp > 1",
    ),
    # fsdp.py
    *_rows(f"{_FSDP}._fsdp_api", "AllGather ReduceScatter", _NO_RUN),
    *_rows(f"{_FSDP}._fsdp_param", "ShardedState ShardedState.SHARDED", _NO_RUN),
    *_rows("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", _NO_FSDP),
    *_rows(f"{_FSDP}._fsdp_state:FSDPState", "_fsdp_param_group", _NO_FSDP),
    *_rows(
        f"{_FSDP}._fsdp_common:FSDPMeshInfo",
        "shard_mesh_size shard_mesh_rank shard_process_group",
        _NO_FSDP,
    ),
    *_rows(
        f"{_FSDP}._fsdp_common:DDPMeshInfo",
        "replicate_mesh_size replicate_process_group",
        "no run with parallel.compression of sharded gradients",
    ),
    *_rows(
        f"{_FSDP}._fsdp_param:FSDPParam",
        "sharded_param mesh_info fsdp_placement mp_policy padded_sharded_param_size sharded_size "
        "unsharded_param sharded_state _unsharded_param _orig_size _sharded_param_data _init_extensions "
        "_module_info",
        _NO_FSDP,
    ),
    *_rows(
        f"{_FSDP}._fsdp_param:FSDPParam",
        "unsharded_accumulated_grad accumulate_unsharded_grad_if_needed to_accumulated_grad_if_needed",
        "not called: torch sums gradients in the parameter, in the precision of their reduction",
        last=(2, 14),
    ),
    *_rows(f"{_FSDP}._fsdp_param:ParamModuleInfo", "module param_name", _NO_FSDP),
    *_rows(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup",
        "fsdp_params mesh_info device reduce_grads reshard_after_backward pre_forward post_forward "
        "post_backward wait_for_unshard is_sharded is_unsharded finalize_backward reshard _training_state "
        "_all_gather_comm _reduce_scatter_comm _init_mp_dtypes _wait_for_post_backward",
        _NO_FSDP,
    ),
    *_rows(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup",
        "_orig_dtype",
        "not read: torch chooses the precision of gradients by frozen parameters too",
        last=(2, 14),
    ),
    # operators.py
    *_rows("torch", "_foreach_norm _foreach_mul_ _foreach_lerp_", _NO_RUN),
    *_rows("torch", "_grouped_mm", "experts on GPUs are slower: one product for each"),
    *_rows("torch._C", "_get_mkldnn_enabled _set_mkldnn_enabled", _NO_TRACE),
    *_rows(
        "torch.ops.aten",
        "_scaled_mm _grouped_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable "
        "_embedding_bag _embedding_bag_forward_only _embedding_bag_backward "
        "_sparse_coo_tensor_with_dims_and_tensors _unsafe_view _to_copy",
        _NO_RUN,
    ),
    *_rows("torch.ops.aten", "_fused_dropout", "dropout by another operator is refused where it draws"),
    *_rows(
        "torch.ops.aten",
        "_native_batch_norm_legit _fused_rms_norm _fused_rms_norm_backward _softmax _softmax_backward_data "
        "_log_softmax _log_softmax_backward_data _adaptive_avg_pool2d _adaptive_avg_pool3d _index_put_impl_",
        _COARSE_TRACE,
    ),
    *_rows("torch.ops", "_c10d_functional _c10d_functional_autograd", _NO_RUN),
    *_rows(
        "torch.ops._c10d_functional",
        "all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_reduce "
        "all_to_all_single reduce_scatter_tensor wait_tensor",
        _NO_RUN,
    ),
    *_rows(
        "torch.ops.c10d",
        "_allgather_base_ _reduce_scatter_base_",
        "dry runs of ranks count no gathers and reductions of shards",
    ),
)
