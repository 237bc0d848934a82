"""Commands that training does not need."""
