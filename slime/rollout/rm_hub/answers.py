"""Finding the final answer in a response: a face of ``slime.utils.grading.boxes``."""

from slime.utils.grading.boxes import boxed_answer, last_boxed_only_string

__all__ = ["boxed_answer", "last_boxed_only_string"]
