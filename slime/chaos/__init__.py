"""Faults in a real run, and whether it heals."""
