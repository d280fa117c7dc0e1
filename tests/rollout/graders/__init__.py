"""Answers with what is true of them, and what each grader says."""
