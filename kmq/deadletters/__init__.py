"""Dead letters: messages that could not be routed or handled, and how they are sent again."""
