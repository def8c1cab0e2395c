"""How fast, how small, how soon: measurements of the broker, never part of a test run. `make bench` runs them."""
