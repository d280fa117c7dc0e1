"""Modules beyond the mathematics of training of which mutants are drawn, and the tests that have to see them.

Of each package those whose tests run in one process: a trainer's rank or an engine of its own would import
the module as it is.
"""

_FORMATS = ("models/test_number_formats", "models/test_stored_scale", "models/test_stored_format")
_ROLLOUT = ("rollout/test_sglang_rollout", "rollout/test_surplus")
SAMPLED: dict[str, tuple[str, ...]] = {
    "slime/weight_sync/pairs.py": ("weight_sync/test_pairs",),
    "slime/weight_sync/agreement.py": ("weight_sync/test_group_address",),
    "slime/models/int4.py": _FORMATS,
    "slime/models/fp8.py": _FORMATS,
    "slime/models/mxfp4.py": ("models/test_stored_scale", "models/test_mxfp4"),
    "slime/models/stored_scale.py": ("models/test_stored_scale",),
    "slime/models/encoding.py": ("models/test_stored_format", "models/test_mxfp4"),
    "slime/models/stored_format.py": ("models/test_stored_format",),
    "slime/models/rope.py": ("models/test_rope",),
    "slime/models/chosen_keys.py": ("models/test_chosen_keys",),
    "slime/rollout/attempts.py": _ROLLOUT,
    "slime/rollout/data_source.py": ("rollout/test_data_source",),
    "slime/rollout/sglang_rollout.py": _ROLLOUT,
    "slime/backends/fsdp_utils/lr_scheduler.py": (
        "backends/fsdp_utils/test_lr_scheduler",
        "backends/megatron_utils/test_optimizer",
    ),
    "slime/backends/embedded_engine/sampler.py": ("backends/embedded_engine/test_sampler",),
}
