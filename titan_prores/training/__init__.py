"""What the training loop stands on."""
