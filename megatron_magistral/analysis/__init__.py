"""What runs are looked at with, away from the training path."""
