"""Framing: turns the lines that ingress and other writers send into blocks of numbered lines. The framer's library."""
