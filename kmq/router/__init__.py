"""The parts of the router: which partition log a record belongs to, and how it gets there."""
