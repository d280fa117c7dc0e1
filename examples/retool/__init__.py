"""A model that calculates with Python, in a sandbox (ReTool, arXiv 2504.11536)."""
