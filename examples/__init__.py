"""Plug-ins and recipes; each folder stands on its own."""
