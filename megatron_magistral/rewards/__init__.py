"""What a completion is paid, as functions of values (arXiv 2506.10910, section 2.2)."""
