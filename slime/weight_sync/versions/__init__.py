"""Versions of weights in directories: whole ones, changes of earlier ones, and what readers make of both."""
