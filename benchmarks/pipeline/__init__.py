"""Asynchronous, one-step-off and synchronous runs of the whole system, measured and predicted."""
