"""The tier: a copy of the WAL off the machine, in an object store or another directory, and its way back."""
