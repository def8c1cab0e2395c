"""The links between two processes: the FIFOs, the rings, their doorbells, and the locks on their ends."""
