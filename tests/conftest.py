"""How properties are searched: the same examples in every run, or, with
`--hypothesis-profile=search`, other ones each time.

Shells have their background jobs ignore SIGINT, and so would the children that tests interrupt.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", settings.get_profile("fixed"), derandomize=False)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
