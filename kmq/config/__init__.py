"""The settings that an operator gives, the states that a fleet gives, and the output to a terminal."""
