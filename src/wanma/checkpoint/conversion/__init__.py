"""Conversion of checkpoints: other dtypes or file counts, and Hugging Face safetensors."""
