"""Conversations: the tokenizer's chat template, answers as targets, rows of whole conversations."""
