"""The Transformer side of Pellucid: contract, decoder, checkpoints, kernels, tokenizers, training.

This package imports nothing by itself, so that the torch-free server frontend can use `pellucid_model.tokenizers`.
"""
