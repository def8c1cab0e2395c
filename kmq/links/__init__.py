"""What joins two processes: the FIFO, the rings, their doorbells, and who owns which end."""
