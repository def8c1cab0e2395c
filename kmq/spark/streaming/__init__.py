"""What all streaming queries share: start, progress, lag, checkpoint and end."""
