"""The back room of the durability stage."""
