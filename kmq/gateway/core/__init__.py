"""What all doors of the gateway share: reading the logs, the figures, the refusals."""
