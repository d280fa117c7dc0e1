"""The default trainer, on megatron-core from PyPI."""

import warnings

from slime.backends.megatron_utils import cpu_support

# The trainer does without them by design.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")

# Before anything imports megatron.core.
cpu_support.install()
