"""The HTTP door of the gateway."""
