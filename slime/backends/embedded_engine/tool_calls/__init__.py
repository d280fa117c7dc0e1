"""Calls of tools in what a model wrote, one format for each family of models.

What is found is data: a text is split, read as JSON or as Python literals, and never evaluated. Everything is
linear in the length of the text, whatever is in it.
"""
