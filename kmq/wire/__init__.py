"""Requests, replies and refusals between brokers and clients: everything they send besides messages."""
