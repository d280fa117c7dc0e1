"""Plug-ins import the count of FLOPs from here."""

from slime.models import calculate_fwd_flops

__all__ = ["calculate_fwd_flops"]
