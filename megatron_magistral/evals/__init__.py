"""Evaluation on held-out problems: estimators (pure) and the runner."""
