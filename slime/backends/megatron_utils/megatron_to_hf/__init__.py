"""Hugging Face tensors of megatron-core's parameters, one file for each kind of model."""
