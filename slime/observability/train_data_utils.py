"""Where plug-ins import recordings of what was trained on from."""

from slime.training.dumps import restore_context_parallel_fields_to_cpu, save_debug_train_data

__all__ = ["restore_context_parallel_fields_to_cpu", "save_debug_train_data"]
