"""`kmq …`: what a person types. One module for each family of commands; app.py puts them together."""
