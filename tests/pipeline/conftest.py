"""Every test of spread models computes on one thread."""

from tests.support.tiny_models import one_thread as one_thread
