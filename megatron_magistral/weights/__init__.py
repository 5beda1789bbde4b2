"""Model weights: what they are called, where their shards live, how they move."""
