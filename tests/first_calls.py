"""Tables that libraries build at their first use, built by being imported: what is forked later has them."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from slime.arguments.core.parser import shared_options

shared_options("embedded", None)
get_checkpoint_conversion_mapping("qwen3")
