"""Where plug-ins import the reducer of losses from."""

from slime.training.losses.reducers import get_sum_of_sample_mean

__all__ = ["get_sum_of_sample_mean"]
