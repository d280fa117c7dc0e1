"""Weights that each trainer rank hands to the engine rank which needs them, without whole tensors."""
