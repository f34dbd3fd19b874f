"""Formats of stored data: samples read as they are, without conversion, by ranges of bytes.

`format.py` is the contract, `detection.py` finds the format of files by their content. A record is a plain
mapping of field to bytes, text, number or array; decoding to tokens or pixels is left to others.
"""
