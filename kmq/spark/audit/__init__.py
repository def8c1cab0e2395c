"""The audit: does every record of the WAL lie in its queue, once and in order?"""
