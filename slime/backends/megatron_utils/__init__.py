"""The default trainer, on megatron-core from PyPI."""

import warnings

from slime.backends.megatron_utils import cpu_support, fused_adam

# The trainer does without them by design.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")

# Before anything imports megatron.core, which the second one does.
cpu_support.install()
fused_adam.install()
