"""The learning rule as functions of values: no distributed code, no I/O (arXiv 2506.10910, 2.1)."""
