"""Makes the shared fixtures known to every test."""

pytest_plugins = ["tests.support.hub_fixtures"]
