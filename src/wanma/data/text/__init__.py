"""Text: documents, tokenizers, token files, the validation split, and packing into sequences."""
