"""Talking to a broker from Python."""
