"""What every streaming query has: its start, progress, lag, checkpoint and end."""
