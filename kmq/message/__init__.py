"""One message: as a line, as an object, and what its fields mean."""
