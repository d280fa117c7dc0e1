"""Programs that make trajectories. Each module has ``TASK_TYPE`` and ``run_rollout(data)``.

It may also have ``is_valid_group(group, group_size)``, ``transform_group(group)`` and
``get_group_data_meta_info(groups)``, which take the place of the queue's own.
"""

import importlib
import pkgutil
from types import ModuleType


def generator_of(task_type: str) -> ModuleType:
    """The module for a type of task.

    Raises:
        ValueError: there is none.
    """
    known = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "TASK_TYPE"):
            known[module.TASK_TYPE] = module
    if task_type not in known:
        raise ValueError(f"task_type {task_type}: no generator makes it (wanted: {', '.join(sorted(known))})")
    return known[task_type]
