"""Training with Hugging Face Accelerate.

As in https://huggingface.co/docs/accelerate/quicktour (prepare, backward), with gradient clipping of
https://huggingface.co/docs/accelerate/basic_tutorials/migration. Started by torchrun, which
https://huggingface.co/docs/accelerate/basic_tutorials/launch allows: `accelerate launch --cpu --num_processes
2` of version 1.15 starts one process only.
"""

from __future__ import annotations

from accelerate import Accelerator  # type: ignore[import-not-found]  # only in the peers' environment

from benchmarks.train.workload import Workload, arguments, cross_entropy


def main() -> None:
    work = Workload(arguments())
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if work.bf16 else "no",
        dynamo_backend="inductor" if work.compile else None,
    )
    model, optimizer, loader = accelerator.prepare(
        work.model, work.adamw(work.model.parameters()), work.loader_of_all_ranks()
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss)
    work.finish(optimizer=type(optimizer.optimizer).__name__, distributed=str(accelerator.distributed_type))


if __name__ == "__main__":
    main()
