"""What a run leaves behind and shows."""
