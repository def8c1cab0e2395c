"""What all streaming queries share: how they start and end, their progress and lag, and their checkpoints."""
