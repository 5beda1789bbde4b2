"""The jail: a small C launcher, the filters it applies, and the Python that speaks to it."""
