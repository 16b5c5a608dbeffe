"""Every test of spread models computes on one thread."""

from tests.support.one_thread import one_thread as one_thread
