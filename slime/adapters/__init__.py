"""Adapters: which layers have one, how they begin, and the files that hold them."""
