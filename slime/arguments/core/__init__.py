"""What a flag, a value and a config group are, and how words become ``args``."""
