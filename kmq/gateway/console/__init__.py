"""The console: what its API shows. Knows the core and the groups; its handlers and its page are in kmq/gateway/http.

static/         the files of the page
docs/           the runbook and the pages that it links to: links into docs/, files in a wheel
overview.py     the broker as one document (kmq/broker/overview.py), an hour of it in steps, how far groups are behind
messages.py     messages by place, seq, key and time, and a sample of what arrives
dead.py         dead letters
"""
