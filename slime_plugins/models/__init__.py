"""Layer specs under the names that launch scripts pass to ``--spec``."""
