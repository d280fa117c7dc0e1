"""Comparing answers. Light to import, since grading processes start with nothing else."""
