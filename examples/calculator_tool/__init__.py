"""A model that learns to ask a calculator."""
