"""The console: its page, and what its API shows. It knows the core and the groups; the handlers are in kmq/gateway/http.

page.py      the files of the page, in static/, as they are sent
overview.py  the broker as one document, and the task that looks at it
overview.py   an hour of it in steps; overview.py: what has happened; overview.py: what the stats page and the logs tell of that
messages.py  messages by place, seq, key and time; messages.py: a sample of what arrives; dead.py: dead letters
topic_rates.py, overview.py   how fast topics grow, how far groups are behind
"""
