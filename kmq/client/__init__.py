"""The Python clients of a broker: Producer and Consumer, blocking and for asyncio."""
