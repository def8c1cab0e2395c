"""`kmq sql`: topics as tables, queried from the command line."""
