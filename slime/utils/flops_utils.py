"""Where plug-ins import the count of FLOPs from."""

from slime.models import calculate_fwd_flops

__all__ = ["calculate_fwd_flops"]
