"""A server that says how likely a Megatron model finds tokens: a teacher in a layout of its own."""
