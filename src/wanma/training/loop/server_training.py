"""Training by parameter servers: workers pull parameters, push gradients, and hold no optimizer.

Worker 0 is the chief: it fills the servers, records the steps, and validates and saves while all pause.
Between pauses only the servers have the newest parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.step_loader import StepLoader
from wanma.job.errors import JobError
from wanma.job.file.run_settings import run_settings
from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import (
    AppliedStep,
    ParameterServers,
    ServedParameter,
    ServerPosition,
    StepContribution,
)
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.data import LEAST_STEPS_AHEAD
from wanma.models.layers.batch_norm import find_step_statistics_modules
from wanma.models.layers.router import TopKRouter
from wanma.models.model_spec import ModelSpec
from wanma.observe.sinks.jsonl import last_record
from wanma.parallel.data_parallel.fsdp_errors import translate_fsdp_errors
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer, provide_global_batch
from wanma.parallel.memory.disk_pool import DiskPool, open_disk_pool
from wanma.parallel.mesh.parallel_mesh import ParallelMesh, open_mesh
from wanma.parallel.parallelize import parallelize
from wanma.parallel.precision.autocast import PRECISION_DTYPES
from wanma.planner.preparation.job_data import open_job_dataset
from wanma.training.checkpointing.resume import ResumeResult, resume
from wanma.training.checkpointing.training_state import TrainingState, seed_generators
from wanma.training.checks.carried_state import first_samples_forward, refuse_carried_state
from wanma.training.checks.process_state import factory_paths, refuse_other_process_state
from wanma.training.checks.served_module import DividedGlobalBatch, ServedModuleCheck
from wanma.training.loop.chief_trainer import ChiefTrainer, applied_totals
from wanma.training.loop.data_position import seek_data
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import (
    build_identified_spec,
    build_loss,
    build_metrics,
    check_user_code,
    hang_timeout_seconds,
    loss_fingerprint,
)
from wanma.training.loop.training_loop import run_step_tasks, validate
from wanma.training.optimizer.learning_rate_schedule import learning_rate_function
from wanma.training.optimizer.named_optimizer import parameter_rules
from wanma.training.optimizer.table_optimizer import table_rates
from wanma.training.optimizer.user_optimizer import load_user_optimization
from wanma.training.run.numerics import configure_numerics, flush_denormals
from wanma.training.run.step_data import StepData
from wanma.training.step.early_stopping import check_validation_keys
from wanma.training.step.forward_backward import ForwardBackward
from wanma.training.step.pulled_tables import WorkerTables


@flush_denormals()
def train_with_servers(
    worker: WorkerContext, request: TrainRequest, servers: ParameterServers, chief_request: TrainRequest
) -> str:
    """Train as one worker of parameter servers.

    Args:
        worker: context of this rank.
        request: job to train.
        servers: the servers.
        chief_request: the same for the chief, whose module is not that of its worker.

    Returns:
        outcome: "finished" or "interrupted".
    """
    job, plan = request.job, request.plan
    refuse_other_process_state(request.process_state, factory_paths(job, request.user_objects))
    configure_numerics(job, plan)
    seed_generators(job.train.seed, worker.rank)
    worker.supervisor_client.report_progress(0, "joining")
    whole = replace(plan, dp_replicate=1, batch_shares=())
    if job.train.embedding_optimizer:  # the chief holds tables and their state as `parallel.embedding` does
        whole = replace(whole, embedding="row_wise")
    alone = replace(whole, embedding="dense", embedding_memory_bytes=None)
    # Each worker is a run of one process: it communicates by the servers alone.
    local = replace(
        worker, rank=0, world_size=1, local_world_size=1, local_world_sizes=(), store=None, memory_files=None
    )
    with (
        open_mesh(local, whole, hang_timeout_seconds(job), job.parallel.collectives) as mesh,
        open_disk_pool(job, worker) as scratch,
        translate_fsdp_errors(alone),
    ):
        data = open_job_dataset(job, request.user_objects.get("data"))
        spec, _ = build_identified_spec(request, data)
        with ServerWorker(worker, request, servers, spec, data, mesh, alone) as runner:
            if worker.rank != 0:
                servers.join(runner.identity)
                servers.begin(0)
                return runner.run(None)
            chief = Chief(chief_request, local, mesh, whole, data, servers, runner.identity, scratch)
            chief.trainer.step_data, runner.message = runner.step_data, chief.trainer.message
            with chief.trainer:
                chief.begin(runner)
                return runner.run(chief)


class ServerWorker:
    """Worker: it computes the gradients of steps with the parameters of the servers."""

    def __init__(
        self,
        worker: WorkerContext,
        request: TrainRequest,
        servers: ParameterServers,
        spec: ModelSpec,
        data: BatchedDataset,
        mesh: ParallelMesh,
        alone: Plan,
    ) -> None:
        self._worker, self._servers, self._data, self._mesh = worker, servers, data, mesh
        self._job, self._targets_per_sample = request.job, data.targets_per_sample
        self.plan = request.plan if servers.mode == "synchronous" else alone
        """Plan by which the worker computes its part of a global batch."""
        data_rank = worker.rank if servers.mode == "synchronous" else 0
        self.tables = WorkerTables(torch.nn.Module())

        def build_module() -> torch.nn.Module:
            module = spec.build_module()
            self.tables = WorkerTables(module, PRECISION_DTYPES[alone.precision])
            return module

        self._model = parallelize(
            replace(spec, build_module=build_module), alone, mesh, request.job.train.seed
        )
        if any(isinstance(module, TopKRouter) for module in self._model.modules()):
            raise JobError(
                f"parameter servers do not support the experts of {spec.name}", "train without servers"
            )
        self._model.initialize_parameters()  # buffers, too
        self._parameters = dict(self._model.named_parameters())
        self.module_check = ServedModuleCheck(self._model) if spec.input_kind == "custom" else None
        """Check of a user's module; None for wanma's own."""
        buffers = "" if self.module_check is None else self.module_check.fingerprint
        self.identity = f"{data.fingerprint} {data.order_identity} {buffers}"
        """Identity of what all workers must have alike."""
        loss = build_loss(request, spec, data, self._model, mesh.device)
        self._forward_backward = ForwardBackward(self._model, alone, mesh, loss)
        self._gatherer = GlobalBatchGatherer(mesh, request.job.train.global_batch)
        schedule = load_user_optimization(request.job.train, request.user_objects).schedule
        self._learning_rate_at = learning_rate_function(request.job.train, schedule)
        self._last_step = -2
        bad_samples = RunDirectory(worker.run_directory).bad_samples(worker.rank)
        self.message: Callable[[str, str], None] = lambda _text, _level: None
        """Function (text, level) that shows the user a message; of the chief, its trainer's."""
        self.step_data = StepData(
            bad_samples, mesh, lambda text, level: self.message(text, level), request.job.data, worker
        )
        if worker.local_rank == 0 and worker.restart is None:  # requests before the first start
            self.step_data.add_traffic(request.prepared_traffic)
        self._loader = StepLoader.of_job(request.job, data, self.plan, data_rank, 0)

    def __enter__(self) -> ServerWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()
        self._data.close()
        self._servers.close()

    def run(self, chief: Chief | None) -> str:
        """Compute steps until the run ends; the chief's tasks are done in its pauses."""
        client = self._worker.supervisor_client
        is_synchronous, steps = self._servers.mode == "synchronous", self._job.train.steps
        while True:
            client.report_progress(self._last_step + 1, "waiting for a step")
            upcoming = 0 if is_synchronous else LEAST_STEPS_AHEAD
            offer = self._servers.next_step(client.is_drain_requested(), upcoming)
            if chief is not None:
                chief.record(offer.records)
                if offer.is_pause:
                    chief.end_pause(client.is_drain_requested())
                    continue
            if offer.outcome:
                client.report_drain(self._last_step + 1)
                return offer.outcome if chief is None else chief.finish(offer.outcome)
            if offer.step is not None:
                # Synchronous workers compute all steps; others load those that are reserved for them.
                self._loader.follow(
                    range(offer.step, steps) if is_synchronous else (offer.step, *offer.upcoming)
                )
                self.compute(offer.step)
                self._last_step = offer.step

    def compute(self, step: int) -> None:
        """Compute one step: load, pull, forward and backward, push."""
        client = self._worker.supervisor_client
        client.report_progress(step, "waiting for data")
        data = next(self._loader)
        self.step_data.begin(self._data, data)
        batches, size = data.micro_batches, data.global_batch_size
        ids = self.tables.ids(batches)
        client.report_progress(step, "pull")
        pulled = self._servers.pull(ids)
        self._fill(pulled, ids)
        client.report_progress(step, "forward and backward")
        self._model.random_draws.step = step
        multiplier = self._model.gradient_divisor / (size * self._targets_per_sample)
        is_divided = self.plan.world_size > 1
        with (
            provide_global_batch(DividedGlobalBatch())
            if is_divided
            else self._gatherer.provide(self.plan, size)
        ):
            loss_sum, targets = self._forward_backward(batches, multiplier)
        if self.module_check is not None:
            self.module_check.check_step(pulled, float(loss_sum))
        client.report_progress(step, "push")
        self._servers.push(step, self._gradients(), ids)
        sums = [
            part.double().reshape(-1).cpu()
            for module in find_step_statistics_modules(self._model.module).values()
            for part in module.pop_sums()
        ]
        self._servers.finish(
            StepContribution(
                step,
                float(loss_sum),
                float(targets),
                multiplier / self._model.gradient_divisor,
                self._learning_rate_at(step),
                torch.cat(sums).numpy().tobytes() if sums else b"",
                self.step_data.exchanged_terms(),
                tuple({one.place for one in data.bad_samples}),
            )
        )

    def _fill(self, tensors: dict[str, Tensor], ids: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_tensor(parameter).detach().copy_(tensors[name])
            parameter.grad = None
        self.tables.fill(ids, tensors, self._mesh.device)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the parameters that have one in this step."""
        hooks = self._model.gradient_hooks
        hooks.collect(self._parameters)
        if hooks:
            raise JobError(
                "a parameter of the model has a gradient hook, and no worker of parameter servers has the "
                "gradient of the global batch",
                "remove the hook, or train without servers (servers.count = 0)",
            )
        gradients = {
            name: local_tensor(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        return self.tables.gradients() | gradients


class Chief:
    """State of the run in the chief, filled from the servers in each pause."""

    def __init__(
        self,
        request: TrainRequest,
        local: WorkerContext,
        mesh: ParallelMesh,
        plan: Plan,
        data: BatchedDataset,
        servers: ParameterServers,
        joined_identity: str,
        scratch: DiskPool,
    ) -> None:
        self._servers, self._data, self._job = servers, data, request.job
        self._release_pages = scratch.release_pages
        newest = last_record(RunDirectory(local.run_directory).metrics)
        recorded = 0 if newest is None else newest["step"]
        position = servers.join(joined_identity, recorded)
        optimization = load_user_optimization(request.job.train, request.user_objects)
        if optimization.optimizer is not None:
            raise JobError(
                f"parameter servers do not support the optimizer {optimization.optimizer.name}",
                "set train.optimizer = 'adamw' or 'sgd', or train without servers (servers.count = 0)",
            )

        def restore(state: TrainingState, *arguments: Any) -> ResumeResult:
            result = resume(state, *arguments, data=data)
            self._is_loaded = position.is_loaded and self._can_go_on(state, position.step)
            if self._is_loaded:  # the servers are ahead of the newest checkpoint
                self._take_state(state)
                state.step = position.step
                state.samples = samples_consumed_before(self._job.train, position.step)
            self._release_pages()
            return result

        spec, model_identity = build_identified_spec(request, data)
        parallel = parallelize(spec, plan, mesh, request.job.train.seed, scratch)
        identity = replace(
            model_identity(),
            data=data.fingerprint,
            order=data.order_identity,
            loss=loss_fingerprint(request),
            settings=run_settings(request.job, spec.settings),
        )
        self.trainer = ChiefTrainer(
            request.job,
            plan,
            local,
            mesh,
            parallel,
            targets_per_sample=data.targets_per_sample,
            identity=identity,
            user_optimization=optimization,
            flops_per_sample=request.flops_per_sample,
            peak_flops_per_second=request.peak_flops_per_second,
            restore=restore,
        )
        self.trainer.records_staleness = servers.mode != "synchronous"
        loss = build_loss(request, spec, data, parallel, mesh.device)
        metrics = build_metrics(request, data, loss)
        standard = ("loss", "perplexity") if data.input_kind == "tokens" else ("loss",)
        check_validation_keys(request.job, (*standard, *metrics.names), data.validation_samples)
        forward_backward = ForwardBackward(parallel, plan, mesh, loss, metrics)
        gatherer = GlobalBatchGatherer(mesh, request.job.train.global_batch)
        self._validate = partial(
            validate, self.trainer, data, forward_backward.evaluate, gatherer, lambda: metrics.names
        )
        self._user_code = request, spec, data, forward_backward, gatherer
        self._last: AppliedStep | None = None
        self._pause_step = 0

    def begin(self, worker: ServerWorker) -> None:
        """Fill the servers, unless they hold the run's parameters already, and begin its steps."""
        state, job, tables = self.trainer.state, self._job, worker.tables.names
        position = ServerPosition(True, state.step, state.named_optimizer.update_count)
        seek_data(self.trainer, self._data)
        if self._data.bad_data_note:
            self.trainer.message(self._data.bad_data_note, "warning")
        self._check_user_code(worker)
        if not self._is_loaded:
            rules = parameter_rules(state.parallel_model.roles, job.train)
            rates = {
                name: (rule.learning_rate_scale, rule.weight_decay or 0.0) for name, rule in rules.items()
            }
            if job.train.embedding_optimizer is not None:
                rates |= {name: table_rates(name, job.train) for name in tables}
            parameters = [
                ServedParameter(name, tuple(parameter.shape), name in tables, *rates[name])
                for name, parameter in state.parallel_model.named_parameters()  # also frozen ones
            ]
            optimizer = {
                "kind": job.train.optimizer,
                "tables": job.train.embedding_optimizer,
                "betas": job.train.betas,
                "epsilon": job.train.epsilon,
                "momentum": job.train.momentum,
            }
            weights = {
                name: local_tensor(parameter).detach()
                for name, parameter in state.parallel_model.named_parameters()
            }
            saved = {
                kind: {name: local_tensor(tensor) for name, tensor in by_name.items()}
                for kind, by_name in state.named_optimizer.state_by_kind().items()
            }
            self._servers.load(parameters, optimizer, weights, saved, position, self._release_pages)
        self._pause_step = self._servers.begin(self._next_pause(), position)

    def _check_user_code(self, worker: ServerWorker) -> None:
        """Try the user's code in the layout of the workers."""
        trainer, (_, _, data, forward_backward, _) = self.trainer, self._user_code
        if worker.module_check is not None:
            worker.module_check.refuse_other_buffers(trainer.state.parallel_model)
        trainer.checked_plan = worker.plan
        check_user_code(trainer, *self._user_code)
        if worker.module_check is not None:
            # Worker 0 validates with a module that counts no passes, as other ranks and micro-batches do.
            trainer.checked_plan = replace(worker.plan, dp_replicate=2, micro_batch=1, batch_shares=())
            refuse_carried_state(trainer, *first_samples_forward(trainer, data, forward_backward))
        trainer.checked_plan = None

    def record(self, records: tuple[AppliedStep, ...]) -> None:
        """Record applied steps; of the last one before a pause, `end_pause` does."""
        seconds = self.trainer.seconds_since_record() / max(len(records), 1)
        for record in records:
            self.trainer.take_step(record, seconds)
            if self.trainer.state.step == self._pause_step:
                self._last = record
            else:
                self.trainer.record_step(applied_totals(record))

    def end_pause(self, is_drain_requested: bool) -> None:
        """Validate and save with the parameters of the servers, and let the workers go on."""
        trainer, train = self.trainer, self._job.train
        state = trainer.state
        self._take_state(state)
        is_interrupted = is_drain_requested or state.step != self._pause_step
        if self._last is not None:
            totals = replace(applied_totals(self._last), is_drain_requested=is_drain_requested)
            run_step_tasks(trainer, totals, self._validate, keeps_last_state=True)
        elif state.step > 0:
            trainer.save()
        self._last = None
        outcome = "interrupted" if is_interrupted else ""
        if state.is_over(train):
            outcome = "finished"
        else:
            self._pause_step = self._next_pause()
        self._servers.resume(self._pause_step, outcome)

    def finish(self, outcome: str) -> str:
        """Wait for pending saves, and record the end."""
        if self._servers.mode != "synchronous":
            counts = self._servers.staleness_histogram()
            text = ", ".join(f"{staleness}: {count}" for staleness, count in sorted(counts.items()))
            self.trainer.message(f"updates by staleness: {text}")
        self.trainer.finish(outcome)
        return outcome

    def _can_go_on(self, state: TrainingState, step: int) -> bool:
        """Return whether the checkpoint has all of the state at `step` that no server holds.

        Batch statistics and early stopping are the chief's, and end with its process.
        """
        train, every = self._job.train, self._job.train.validate_every_steps
        stops = bool(train.stop_patience and every and step // every != state.step // every)
        has_statistics = bool(find_step_statistics_modules(state.parallel_model.module))
        return step == state.step or not (stops or has_statistics)

    def _next_pause(self) -> int:
        """Return the next step before which the run validates or saves."""
        train, step = self._job.train, self.trainer.state.step
        intervals = (train.validate_every_steps, self._job.checkpoint.every_steps)
        stops = [(step // interval + 1) * interval for interval in intervals if interval]
        return min([train.steps, *stops])

    def _take_state(self, state: TrainingState) -> None:
        """Copy what the servers have changed into the chief's parameters and state, part by part."""
        optimizer, updates = state.named_optimizer, self._servers.join().updates
        weights = dict(state.parallel_model.named_parameters())
        with_state = {name for by_name in optimizer.state_by_kind().values() for name in by_name}
        trained = {name for name, parameter in optimizer.parameters.items() if parameter.requires_grad}
        if updates and (missing := trained - with_state):
            optimizer.allocate_state(f"{name}.state" for name in missing)
        counts: dict[str, int] = {}
        own: Mapping[str, Mapping[str, Tensor]] = {"weight": weights, **optimizer.state_by_kind()}
        changed: dict[str, Tensor] = {}
        for table_optimizer in optimizer.table_optimizers:
            changed |= table_optimizer.changed_rows()
        for parameter, rows, tensors in self._servers.fetch():
            place = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
            kinds = tensors.keys() - {"step"}
            if any(parameter.name not in own.get(kind, ()) for kind in kinds):  # released by a forward
                optimizer.allocate_state([f"{parameter.name}.state"])
                own = {"weight": weights, **optimizer.state_by_kind()}
            for kind in kinds:
                target = local_tensor(own[kind][parameter.name]).detach()
                part = tensors[kind].to(target.device)
                if target.ndim:
                    target[place] = part.reshape(len(rows), *target.shape[1:])
                else:
                    target.copy_(part.reshape(()))
            counts[parameter.name] = int(tensors.get("step", 0))
            if parameter.name in changed:
                changed[parameter.name][place] = True
            self._release_pages()
        for name, kind, value in optimizer.state_entries():
            if kind == "step" and (missed := updates - counts.get(name, updates)):
                value.fill_(counts[name])  # it had no gradient in some updates
                optimizer.missed_updates[name] = missed
        optimizer.update_count = updates
