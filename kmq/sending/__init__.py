"""Sending without I/O: the acknowledged protocol, messages without an outcome, and outcomes. Its users move the bytes.

protocol.py   the lines of the protocol besides messages
delivery.py   messages that are sent together, and their outcomes
window.py     messages without an outcome, in order; when they are written, and when to connect again
failures.py   why a message was not stored
"""
