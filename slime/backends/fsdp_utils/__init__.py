"""The trainer on PyTorch alone: a ``transformers`` model under FSDP2, without megatron-core."""
