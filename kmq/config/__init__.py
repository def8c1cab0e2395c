"""What an operator sets: settings, files of state, the terminal."""
