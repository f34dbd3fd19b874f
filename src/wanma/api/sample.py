"""Let a trained text model write: one token after the other, streamed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from wanma.job.errors import WanmaError
from wanma.job.load import load_job
from wanma.job.run_directory import RunDirectory


def sample(
    run: RunDirectory,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    *,
    step: int | None = None,
    on_message: Callable[[str], None] = warnings.warn,
) -> Iterator[str]:
    """Continue `prompt` with a checkpoint of `run`, averaged weights if it has them.

    Args:
        tokens: how many to write.
        temperature: divides the logits; 0 takes the likeliest token.
        step: of the checkpoint; None: the newest that is whole.
        on_message: gets the reason where damage lets an older checkpoint be taken than the newest.

    Yields:
        pieces of text as they come.

    Raises:
        WanmaError: the run has no such checkpoint, or it is damaged, or its model reads no text.
    """
    import torch

    from wanma.checkpoint.reader import load_full
    from wanma.checkpoint.verify import find_whole
    from wanma.data.tokenizer import load_tokenizer
    from wanma.models.build import empty_model, model_spec

    job = load_job(run.job)
    path = find_whole(run.checkpoints, step, on_message)
    kept = run.path / "tokenizer"
    tokenizer = load_tokenizer(kept if kept.is_dir() else job.data.tokenizer)
    length = job.data.sequence_length
    spec = model_spec(
        job.model, vocabulary=tokenizer.vocabulary, sequence_length=length, image_shape=None, classes=None
    )
    if spec.kind != "tokens":
        raise WanmaError(f"{run.path} trained {spec.name}, which reads no text", "sample from a text model")
    model = empty_model(spec)
    saved = load_full(path)
    # Of tied parameters only the first name was saved; buffers are not averaged.
    held = [name for name, _ in model.named_parameters()]
    held += [name for name, _ in model.named_buffers() if name in model.state_dict()]
    try:
        weights = {name: saved.get(f"average.{name}", saved[f"model.{name}"]) for name in held}
        model.load_state_dict(weights, strict=False)
    except (KeyError, RuntimeError) as error:
        raise WanmaError(
            f"{path} is of another model than {run.job} describes",
            "put back the job.toml that the run was trained with",
        ) from error
    model.eval()

    generator = torch.Generator().manual_seed(seed)
    context = [int(token) for token in tokenizer.encode(prompt.encode())] or [tokenizer.end_of_document]
    written: list[int] = []
    shown = ""
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(torch.tensor([context[-length:]]))[0, -1, : tokenizer.vocabulary].float()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(chances, 1, generator=generator))
            if token == tokenizer.end_of_document:
                return
            context.append(token)
            written.append(token)
            text = tokenizer.decode(written)
            # A character may take several tokens: hold back what is not whole yet.
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            yield text[len(shown) :]
            shown = text
