"""The default trainer, on megatron-core from PyPI, which importing this package does not load."""

from slime.backends.megatron_utils import import_hook

import_hook.register()
