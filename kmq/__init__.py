"""KMQ: a message broker inside one pod, whose every message is a line in a text file."""

__version__ = "0.1.0"
