"""What each kind of component must have."""
