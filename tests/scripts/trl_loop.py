"""A script for torchrun: the SFTTrainer of TRL on a tiny Llama, without anything from the network."""

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "the", "horse", "runs", "sleeps", "far", "and", "fast"]


def main() -> None:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )
    arguments = SFTConfig(
        output_dir="trained",
        max_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        max_length=16,
        report_to="none",
        save_strategy="no",
    )
    data = Dataset.from_list([{"text": "the horse runs far and fast"}, {"text": "the horse sleeps"}] * 8)
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    result = trainer.train()
    print(f"rank {arguments.process_index} of {arguments.world_size}: {result.global_step} steps")


if __name__ == "__main__":
    main()
