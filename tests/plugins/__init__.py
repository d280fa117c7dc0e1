"""Plug-ins of pytest for this suite: its order, its progress, the logs in its failures, random delays."""
