"""Makes the shared fixtures known to every test, and every process of the tests one that can be interrupted."""

import signal

pytest_plugins = ["tests.support.hub_fixtures"]

# A shell starts what runs in its background with interrupts ignored, and whatever that starts would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
