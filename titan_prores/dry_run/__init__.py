"""What --check reports."""
