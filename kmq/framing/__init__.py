"""The back room of the framer: from the text of the FIFO to numbered lines."""
