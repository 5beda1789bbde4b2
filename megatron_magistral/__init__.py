"""Train a base LLM to reason by reinforcement learning from verifiable rewards, after Magistral."""

__version__ = "0.1.0"
