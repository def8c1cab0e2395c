"""What brokers and clients say to one another besides messages."""
