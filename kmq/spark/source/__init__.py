"""format("kmq") for reading: its options, the plan of a query, and what each task reads."""
