"""Fine-tuning of a Hugging Face model with LoRA, offline: the model is made here, tiny and untrained.

    python examples/finetune_lora.py
    python examples/finetune_lora.py path/to/Llama-3.2-1B      # a real one, from a folder

Only the adapters are trained. The result is merged and exported for transformers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import wanma


def make_model(folder: Path) -> Path:
    """Save a tiny Llama of random weights to `folder`, as `save_pretrained` writes every model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,  # bytes, and the end of a document
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main(model: Path, steps: int) -> None:
    tokenizer = model / "tokenizer.json"
    job = {
        "model": {"huggingface": str(model), "lora_rank": 8, "lora_alpha": 16},
        "data": {
            "text": ["stdlib"],  # files, folders or globs of your own text
            "sequence_length": 128,
            "tokenizer": str(tokenizer) if tokenizer.exists() else "bytes",
        },
        "train": {"steps": steps, "global_batch": 8, "learning_rate": 1e-2},
        "parallel": {"dp_replicate": 2},
        "checkpoint": {"start_from": str(model)},
        "observe": {"name": "finetune-lora", "log_every_steps": 5},
    }
    result = wanma.train(job)
    weights = result.weights()
    adapters = {name: weight for name, weight in weights.items() if ".lora_" in name}
    share = sum(weight.numel() for weight in adapters.values()) / sum(w.numel() for w in weights.values())
    print(f"trained {len(adapters)} adapter matrices, {share:.1%} of the parameters")

    out = result.run.path / "merged"
    export = [sys.executable, "-m", "wanma", "export", str(result.run.path), "--to", str(out)]
    subprocess.run(export, check=True)
    merged = AutoModelForCausalLM.from_pretrained(out)
    print(f"transformers loads {type(merged).__name__} from {out}")


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else make_model(Path("build/tiny-llama"))
    main(given, steps=20)
