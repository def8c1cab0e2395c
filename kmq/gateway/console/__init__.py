"""The console: its page, and what its API shows. Knows the core and the groups; its handlers are in kmq/gateway/http.

page.py         the files of the page, in static/, as they are sent
overview.py     the broker as one document (kmq/broker/overview.py), an hour of it in steps, how far groups are behind
messages.py     messages by place, seq, key and time, and a sample of what arrives
dead.py         dead letters
"""
