"""GGUF files: one file that holds configuration, tokenizer and weights, as llama.cpp and its kin write it.

header.py          the file's metadata and table of tensors, checked before anything is believed; without torch
types.py           how tensors are stored: names and block sizes
architectures.py   how each architecture's metadata and tensor names read as ours
loading.py         a file to a model
"""

from pellucid_model.gguf.header import Header, is_gguf, read_header

__all__ = ["Header", "is_gguf", "read_header"]
