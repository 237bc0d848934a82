"""Recipes: reading, checking and typing them."""
