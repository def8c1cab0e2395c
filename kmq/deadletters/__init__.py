"""Dead letters: what becomes of messages that could not be routed or handled."""
