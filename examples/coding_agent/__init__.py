"""A model that repairs code in a sandbox, and is graded in another one."""
