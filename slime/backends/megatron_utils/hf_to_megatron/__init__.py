"""Parameters of megatron-core out of Hugging Face checkpoints, one file for each kind of model."""
