"""A log that remembers which events it was told."""


class Heard:
    def __init__(self):
        self.events = []

    def info(self, event, **fields):
        self.events.append(event)

    warn = info
