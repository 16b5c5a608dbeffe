"""Every test of the engine computes on one thread."""

from tests.support.tiny_models import one_thread as one_thread
