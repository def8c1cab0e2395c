"""format("kmq") for reading: options, plan, and what a task of it does."""
