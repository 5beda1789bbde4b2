"""Training of the policy with Megatron-core."""
