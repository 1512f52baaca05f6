"""Measurements on a card: rates, and memory and time of training steps."""
